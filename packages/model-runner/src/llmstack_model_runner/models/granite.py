"""Granite: a Llama whose embeddings, residuals, attention and logits have factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.models.config_values import read_bool, read_factor, read_float
from llmstack_model_runner.models.llama import Llama, Settings, read_llama


class ScaledInputs(Llama):
    """A mixin of Granite models: vectors that are given in place of tokens have the factor of embeddings too."""

    def _enter(self, token_ids: torch.Tensor, given: StepVectors | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if given is not None:
            given = given._replace(vectors=given.vectors * self._tokens.scale)
        return super()._enter(token_ids, given)


class Granite(ScaledInputs):
    """`GraniteForCausalLM`: Granite 3, and the text model of Granite Speech."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        return read_granite(config, has_mlp_bias=read_bool(config, "mlp_bias", False))


def read_granite(config: Mapping[str, Any], **variants: Any) -> Settings:
    """The fields of all Granite models, factors among them; `variants` as of `read_llama`."""
    has_bias = read_bool(config, "attention_bias", False)
    settings = read_llama(
        config,
        has_qkv_bias=has_bias,
        has_attention_out_bias=has_bias,
        scale=read_float(config, "attention_multiplier", 1.0),
        residual_scale=read_float(config, "residual_multiplier", 1.0),
        **variants,
    )
    return replace(
        settings,
        embedding_scale=read_float(config, "embedding_multiplier", 1.0),
        logit_scale=1 / read_factor(config, "logits_scaling"),
    )
