"""Decoders for pooling, without an LM head or with a classification head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers import WeightSlot, collect_slots
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers.linear import SmallLinear
from llmstack_model_runner.media.encoder import MediaEncoder
from llmstack_model_runner.models.base import CausalLM, Classifier, Model
from llmstack_model_runner.models.config_values import embedding_size, read_num_labels
from llmstack_model_runner.models.kv_spec import KVCaches


class PoolingDecoder(Model):
    """A decoder without an LM head.

    Attributes:
        decoder_class: The causal language model that the decoder is part of.
    """

    decoder_class: ClassVar[type[CausalLM]]

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        # An untied head would be a tensor that the checkpoint lacks.
        self._decoder = self.decoder_class({**config, "tie_word_embeddings": True}, dtype, device)
        self.kv_spec = self._decoder.kv_spec

    @property
    def vector_size(self) -> int | None:
        return self._decoder.vector_size

    def media_encoder(self) -> MediaEncoder | None:
        """Delegates to the decoder."""
        return self._decoder.media_encoder()

    def slots(self) -> dict[str, WeightSlot]:
        return self._decoder.slots()

    def optional_slots(self) -> dict[str, WeightSlot]:
        return self._decoder.optional_slots()

    def rename(self, name: str) -> str:
        """Delegates to the decoder."""
        return self._decoder.rename(name)

    def is_ignored(self, name: str) -> bool:
        """Whether the decoder ignores the tensor, or it belongs to an LM head."""
        return name.startswith("lm_head.") or self._decoder.is_ignored(name)

    def limit_context(self, max_model_len: int) -> None:
        """Delegates to the decoder."""
        self._decoder.limit_context(max_model_len)

    def hold_positions(self, num_positions: int) -> None:
        """Delegates to the decoder."""
        self._decoder.hold_positions(num_positions)

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states after the last norm."""
        return self._decoder.forward(token_ids, positions, metadata, kv_caches)


class DecoderClassifier(PoolingDecoder, Classifier):
    """A decoder with the classification head `score` over a prompt's last token."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.num_labels = read_num_labels(config)
        self._score = SmallLinear("score", embedding_size(config), self.num_labels, device=device, has_bias=False)

    def slots(self) -> dict[str, WeightSlot]:
        return super().slots() | collect_slots([self._score])

    @torch.inference_mode()
    def compute_label_logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._score(states)


def make_pooling_decoder(decoder_class: type[CausalLM], base: type[PoolingDecoder]) -> type[PoolingDecoder]:
    """A subclass of `base` for the given causal language model."""
    facts = {
        "decoder_class": decoder_class,
        "root": decoder_class.root,
        "implementation": decoder_class.implementation,
        "can_be_sharded": decoder_class.can_be_sharded,
        "keeps_numeric_contract": decoder_class.keeps_numeric_contract,
    }
    return type(f"{base.__name__}Of{decoder_class.__name__}", (base,), facts)
