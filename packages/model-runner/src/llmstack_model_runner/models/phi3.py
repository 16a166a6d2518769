"""Phi-3 and Phi-4: Llama with joined projections, a rotary embedding of a part of each head, and one sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_model_runner.models.config_values import read_int
from llmstack_model_runner.models.llama import Llama, Settings, read_llama


class Phi3(Llama):
    """`Phi3ForCausalLM`; `longrope` takes its long factors if longer contexts than the original are served."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        """The configuration, checked."""
        window = None if config.get("sliding_window") is None else read_int(config, "sliding_window")
        complete = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config, "layer_types": None}
        return read_llama(complete, window, has_fused_projections=True)
