"""Decoders that only pool: those without an output head, and those with one that tells prompts apart by labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_model_runner.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers import WeightSlot, collect_slots
from llmstack_model_runner.layers.small_linear import SmallLinear
from llmstack_model_runner.models.base import CausalLM, Classifier, KVCaches, Model
from llmstack_model_runner.models.config_values import read_num_labels
from llmstack_model_runner.pooling.embedding_size import embedding_size


class HeadlessDecoder(Model):
    """A decoder whose output head is neither loaded nor packed.

    Attributes:
        decoder_class: The decoder with its head.
    """

    decoder_class: ClassVar[type[CausalLM]]

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        # A head of its own would be a tensor that the checkpoint lacks.
        self._decoder = self.decoder_class({**config, "tie_word_embeddings": True}, dtype, device)
        self.kv_spec = self._decoder.kv_spec

    def slots(self) -> dict[str, WeightSlot]:
        """All tensors."""
        return self._decoder.slots()

    def optional_slots(self) -> dict[str, WeightSlot]:
        """As the decoder's."""
        return self._decoder.optional_slots()

    def rename(self, name: str) -> str:
        """As the decoder does."""
        return self._decoder.rename(name)

    def is_ignored(self, name: str) -> bool:
        """What the decoder ignores, and a head that nobody asked for."""
        return name.startswith("lm_head.") or self._decoder.is_ignored(name)

    def limit_context(self, max_model_len: int) -> None:
        """As the decoder does."""
        self._decoder.limit_context(max_model_len)

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states after the last norm."""
        return self._decoder.forward(token_ids, positions, metadata, kv_caches)


class DecoderClassifier(HeadlessDecoder, Classifier):
    """A decoder with the head `score` over a prompt's last token."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.num_labels = read_num_labels(config)
        self._score = SmallLinear("score", embedding_size(config), self.num_labels, device=device, has_bias=False)

    def slots(self) -> dict[str, WeightSlot]:
        """All tensors."""
        return super().slots() | collect_slots([self._score])

    @torch.inference_mode()
    def compute_label_logits(self, states: torch.Tensor) -> torch.Tensor:
        """The head alone."""
        return self._score(states)


def make_headless(decoder_class: type[CausalLM], base: type[HeadlessDecoder]) -> type[HeadlessDecoder]:
    """`base` over the given decoder."""
    facts = {
        "decoder_class": decoder_class,
        "root": decoder_class.root,
        "implementation": decoder_class.implementation,
        "keeps_numeric_contract": decoder_class.keeps_numeric_contract,
    }
    return type(f"{base.__name__}Of{decoder_class.__name__}", (base,), facts)
