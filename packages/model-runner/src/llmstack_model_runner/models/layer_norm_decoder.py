"""Decoders of equal blocks with layer norms: GPT-2, OPT, GPT-NeoX, Phi and others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers import (
    Embedding,
    LayerNorm,
    Linear,
    OutputHead,
    RotaryEmbedding,
    WeightSlot,
    plan_layers,
)
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerCache, LayerStep
from llmstack_model_runner.layers.rotary import RopeParameters
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.models.base import CausalLM
from llmstack_model_runner.models.kv_spec import KVCaches, ModelKVSpec, keys_and_values
from llmstack_model_runner.models.layer_norm_block import BlockSettings, LayerNormBlock
from llmstack_model_runner.models.stages import stage_slots


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A learned vector for each position.

    Attributes:
        name: The tensor's name in the checkpoint, without `.weight`.
        num_unused_rows: Rows before the one of position 0.
    """

    name: str
    num_unused_rows: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingProjection:
    """Matrices between an embedding that is narrower than the blocks, and the blocks.

    Attributes:
        size: Width of the embedding and of the output head.
        project_in: Name of the matrix from the embedding to the blocks.
        project_out: Name of the matrix from the blocks to the output head.
    """

    size: int
    project_in: str
    project_out: str


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """Sizes, names and variants that a configuration gives; names are the checkpoint's.

    Attributes:
        layers: Prefix of the blocks' names, before their number.
        norm: Name of the norm after the last block, or None.
        attention_scales: `BlockSettings.attention_scale` of each block; empty if it is the same for all.
        positions: Learned positions, or None.
        projection: None if the embedding is as wide as the blocks.
        embedding_norm: Name of the norm after the embedding, or None.
    """

    tokens: str
    layers: str
    norm: str | None
    vocab_size: int
    max_model_len: int
    num_layers: int
    block: BlockSettings
    attention_scales: tuple[float, ...] = ()
    rope: RopeParameters | None = None
    positions: PositionTable | None = None
    projection: EmbeddingProjection | None = None
    embedding_norm: str | None = None
    is_tied: bool = False
    has_head_bias: bool = False


class LayerNormDecoder(CausalLM):
    """Embedding, blocks, norm and output head."""

    can_be_sharded: ClassVar[bool] = True
    can_omit_tokens: ClassVar[bool] = True

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        settings = self.read_settings(config)
        block, size, vocab_size = settings.block, settings.block.hidden_size, settings.vocab_size
        embedding_size = size if settings.projection is None else settings.projection.size
        self.kv_spec = ModelKVSpec(
            (keys_and_values(block.num_kv_heads, block.head_dim),) * settings.num_layers,
            vocab_size=vocab_size,
            max_model_len=settings.max_model_len,
        ).of_rank(block.num_heads)
        self._sharding = sharding()
        self._settings = settings
        self._like = torch.empty(0, dtype=dtype, device=device)

        def norm(name: str | None) -> LayerNorm | None:
            return None if name is None else LayerNorm(name, size, block.eps, dtype=dtype, device=device)

        self._tokens = Embedding(
            settings.tokens, vocab_size, embedding_size, dtype=dtype, device=device, is_vocabulary=True
        )
        self._positions = _make_positions(settings, dtype, device)
        self._project_in, self._project_out = _make_projections(settings, dtype, device)
        self._embedding_norm, self._norm = norm(settings.embedding_norm), norm(settings.norm)
        self._rotary = None if settings.rope is None else RotaryEmbedding(settings.rope, device)
        self._layers = [
            LayerNormBlock(f"{settings.layers}{index}.", block, self._rotary, dtype, device)
            for index, block in enumerate(_blocks(settings))
        ]
        self._head = OutputHead(
            vocab_size,
            embedding_size,
            dtype=dtype,
            device=device,
            tied_to=self._tokens if settings.is_tied else None,
            has_bias=settings.has_head_bias,
        )

    @classmethod
    @abstractmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        """Reads and checks a parsed config.json; a ValueError names the field at fault."""

    @property
    def vector_size(self) -> int | None:
        return self._tokens.size

    def slots(self) -> dict[str, WeightSlot]:
        before = [self._tokens, self._positions, self._project_in, self._embedding_norm]
        behind = [self._norm, self._project_out, self._head]
        return stage_slots(self._sharding, before, self._layers, behind, is_tied=self._settings.is_tied)

    def is_ignored(self, name: str) -> bool:
        """Causal masks of old checkpoints, and a copy of a tied head."""
        return name.endswith((".attention.bias", ".attn.bias")) or name == "lm_head.weight" or super().is_ignored(name)

    def limit_context(self, max_model_len: int) -> None:
        if self._rotary is not None:
            self._rotary.limit_positions(max_model_len)

    def hold_positions(self, num_positions: int) -> None:
        if self._rotary is not None:
            self._rotary.hold_positions(num_positions)

    def finish_loading(self) -> None:
        if self._sharding.is_last_stage:
            self._head.finish_loading()

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states after the last norm and projection, or after this stage's last block."""
        planned = plan_layers(metadata, kv_caches, [None] * self.kv_spec.num_layers)
        hidden = self._enter(token_ids, positions, metadata.vectors)
        start = self.kv_spec.first_layer
        layers = self._layers[start : start + self.kv_spec.num_layers]
        caches = kv_caches if self.cross_kv is None else self._caches(kv_caches, metadata)
        for layer, kv_cache, plan in zip(layers, caches, planned, strict=True):
            hidden = layer(hidden, LayerStep(positions, kv_cache, *plan))
        if not self._sharding.is_last_stage:
            self._sharding.send([hidden])
            return hidden
        if self._norm is not None:
            hidden = self._norm(hidden)
        return hidden if self._project_out is None else self._project_out(hidden)

    def _caches(self, kv_caches: KVCaches, metadata: AttentionMetadata) -> Iterable[LayerCache]:
        """The KV caches of the layers of this stage, one after the other."""
        return kv_caches

    def _enter(self, token_ids: torch.Tensor, positions: torch.Tensor, given: StepVectors | None) -> torch.Tensor:
        """Hidden states before this stage's first block."""
        if self._sharding.is_first_stage:
            return self._embed(token_ids, positions, given)
        shape = (token_ids.shape[0], self._settings.block.hidden_size)
        return self._sharding.receive(1, self._like, shape)[0]

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor, given: StepVectors | None) -> torch.Tensor:
        hidden = self._tokens(token_ids, given=given)
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        if self._positions is not None:
            hidden = self._positions(positions, addend=hidden)
        return hidden if self._embedding_norm is None else self._embedding_norm(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)


def _blocks(settings: DecoderSettings) -> list[BlockSettings]:
    if not settings.attention_scales:
        return [settings.block] * settings.num_layers
    return [replace(settings.block, attention_scale=scale) for scale in settings.attention_scales]


def _make_positions(settings: DecoderSettings, dtype: torch.dtype, device: torch.device) -> Embedding | None:
    table = settings.positions
    if table is None:
        return None
    return Embedding(
        table.name,
        settings.max_model_len + table.num_unused_rows,
        settings.block.hidden_size,
        dtype=dtype,
        device=device,
        num_unused_rows=table.num_unused_rows,
    )


def _make_projections(
    settings: DecoderSettings, dtype: torch.dtype, device: torch.device
) -> tuple[Linear | None, Linear | None]:
    projection, size = settings.projection, settings.block.hidden_size
    if projection is None:
        return None, None
    parts = {projection.project_in: size}, {projection.project_out: projection.size}
    project_in = Linear(projection.size, parts[0], has_bias=False, dtype=dtype, device=device)
    return project_in, Linear(size, parts[1], has_bias=False, dtype=dtype, device=device)
