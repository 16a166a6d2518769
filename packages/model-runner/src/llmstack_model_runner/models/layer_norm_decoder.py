"""Decoders of equal blocks with layer norms, which GPT-NeoX, Phi and their kin read their configurations into."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmstack_model_runner.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers import (
    Embedding,
    LayerNorm,
    OutputHead,
    RotaryEmbedding,
    WeightSlot,
    collect_slots,
    plan_attention,
)
from llmstack_model_runner.layers.rotary import RopeParameters
from llmstack_model_runner.models.base import CausalLM, KVCaches, ModelKVSpec
from llmstack_model_runner.models.layer_norm_block import BlockSettings, LayerNormBlock


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """What a configuration comes down to; names are the checkpoint's.

    Attributes:
        layers: Prefix of the blocks' names, before their number.
        embedding_norm: Normalises the embedding, or None.
    """

    tokens: str
    layers: str
    norm: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    block: BlockSettings
    rope: RopeParameters | None = None
    embedding_norm: str | None = None
    is_tied: bool = False
    has_head_bias: bool = False


class LayerNormDecoder(CausalLM):
    """Embedding, blocks, norm and output head."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        settings = self.read_settings(config)
        block, size, vocab_size = settings.block, settings.block.hidden_size, settings.vocab_size
        self.kv_spec = ModelKVSpec(
            num_layers=settings.num_layers,
            num_kv_heads=block.num_kv_heads,
            head_dim=block.head_dim,
            vocab_size=vocab_size,
            max_model_len=settings.max_model_len,
        )

        def norm(name: str) -> LayerNorm:
            return LayerNorm(name, size, block.eps, dtype=dtype, device=device)

        self._tokens = Embedding(settings.tokens, vocab_size, size, dtype=dtype, device=device)
        self._embedding_norm = None if settings.embedding_norm is None else norm(settings.embedding_norm)
        self._rotary = None if settings.rope is None else RotaryEmbedding(settings.rope, device)
        self._layers = [
            LayerNormBlock(f"{settings.layers}{index}.", block, self._rotary, dtype, device)
            for index in range(settings.num_layers)
        ]
        self._norm = norm(settings.norm)
        self._head = OutputHead(
            vocab_size,
            size,
            dtype=dtype,
            device=device,
            tied_to=self._tokens if settings.is_tied else None,
            has_bias=settings.has_head_bias,
        )

    @classmethod
    @abstractmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        """The configuration, checked."""

    def slots(self) -> dict[str, WeightSlot]:
        """All tensors."""
        return collect_slots([self._tokens, self._embedding_norm, *self._layers, self._norm, self._head])

    def is_ignored(self, name: str) -> bool:
        """Causal masks of old checkpoints, and a copy of a tied head."""
        return name.endswith((".attention.bias", ".attn.bias")) or name == "lm_head.weight" or super().is_ignored(name)

    def limit_context(self, max_model_len: int) -> None:
        """Make the rotary embedding's table for it."""
        if self._rotary is not None:
            self._rotary.limit_positions(max_model_len)

    def finish_loading(self) -> None:
        """Pack the head."""
        self._head.finish_loading()

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states after the last norm."""
        plans = plan_attention(metadata, kv_caches[0][0], [None])
        hidden = self._tokens(token_ids)
        if self._embedding_norm is not None:
            hidden = self._embedding_norm(hidden)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            hidden = layer(hidden, positions, kv_cache, metadata, plans)
        return self._norm(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the given rows."""
        return self._head(hidden)
