"""Block with layer norms: attention and feed-forward, parallel or sequential."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from llmstack_model_runner.layers import (
    Attention,
    HeadRotation,
    LayerNorm,
    Linear,
    RotaryEmbedding,
    WeightSlot,
    collect_slots,
)
from llmstack_model_runner.layers.attention_metadata import LayerStep
from llmstack_model_runner.layers.cross_attention import CrossAttention, CrossNames
from llmstack_model_runner.layers.head_split import HeadSplit
from llmstack_model_runner.layers.linear import gated_activation, linear_activation
from llmstack_model_runner.layers.sharding import sharding


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Names of a block's parts in the checkpoint, without the block's prefix.

    Attributes:
        mlp_norm: None if the feed-forward shares the norm of attention, which needs `is_parallel`.
        qkv: One name for a joined tensor, or three.
        mlp_in: One name, or two where the first gates the second.
        cross: Of cross attention, between attention and feed-forward; None for a block without.
    """

    attention_norm: str
    mlp_norm: str | None
    qkv: tuple[str, ...]
    attention_out: str
    mlp_in: tuple[str, ...]
    mlp_out: str
    cross: CrossNames | None = None


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """Sizes and variants of one block.

    Attributes:
        is_parallel: Attention and feed-forward both read the block's input.
        is_norm_first: Norms precede attention and feed-forward; otherwise they follow each residual sum.
        attention_scale: Factor of the attention scores; None is head_dim ** -0.5.
        is_transposed: The checkpoint stores its matrices as [in_features, out_features].
        qkv_row_orders: For each name of `names.qkv`, the checkpoint's row for each output; empty if in order.
        alibi_slopes: ALiBi slope of each head, or None.
        parts_without_bias: Names among those of queries, keys and values that have no bias.
    """

    names: BlockNames
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    activation: str
    is_parallel: bool = False
    is_norm_first: bool = True
    attention_scale: float | None = None
    is_transposed: bool = False
    has_qkv_bias: bool = True
    has_attention_out_bias: bool = True
    has_mlp_bias: bool = True
    qkv_row_orders: Sequence[torch.Tensor | None] = field(default=())
    alibi_slopes: torch.Tensor | None = None
    parts_without_bias: tuple[str, ...] = ()


class LayerNormBlock:
    """Attention and feed-forward, each after a norm and added to the residual.

    Attributes:
        cross: Cross attention between them, which needs norms first; None for a block without.
    """

    def __init__(
        self,
        prefix: str,
        settings: BlockSettings,
        rotary: RotaryEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        names, size, inner_size = settings.names, settings.hidden_size, settings.inner_size
        head_dim = settings.head_dim
        self._head_dim = head_dim
        split = HeadSplit(settings.num_heads, settings.num_kv_heads, head_dim)
        self._query_size, self._kv_size = split.query_size, split.kv_size
        self._is_parallel, self._is_norm_first = settings.is_parallel, settings.is_norm_first
        self._rotate = None if rotary is None else HeadRotation(rotary)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(prefix + name, size, settings.eps, dtype=dtype, device=device)

        def linear(in_features: int, parts: Mapping[str, int], has_bias: bool, **share: Any) -> Linear:
            named = {prefix + name: size for name, size in parts.items()}
            is_transposed = settings.is_transposed
            return Linear(
                in_features, named, has_bias=has_bias, dtype=dtype, device=device, is_transposed=is_transposed, **share
            )

        self._attention_norm = norm(names.attention_norm)
        self._qkv = _make_qkv(prefix, settings, split, dtype, device)
        slopes = None if settings.alibi_slopes is None else settings.alibi_slopes[split.heads.start : split.heads.stop]
        self._attention = Attention(
            len(split.heads),
            len(split.kv_heads),
            head_dim,
            head_dim**-0.5 if settings.attention_scale is None else settings.attention_scale,
            device=device,
            alibi_slopes=None if slopes is None else slopes.to(device),
        )
        num_features, has_out_bias = settings.num_heads * head_dim, settings.has_attention_out_bias
        self._attention_out = linear(num_features, {names.attention_out: size}, has_out_bias, inputs=split.inputs)
        self.cross: CrossAttention | None = None
        if names.cross is not None:
            sizes = (size, settings.num_heads, head_dim)
            self.cross = CrossAttention(prefix, names.cross, sizes, settings.eps, dtype=dtype, device=device)
        self._mlp_norm = None if names.mlp_norm is None else norm(names.mlp_norm)
        own = sharding().share(inner_size)
        mlp_in_outputs = {prefix + name: [own] for name in names.mlp_in}
        self._mlp_in = linear(
            size, dict.fromkeys(names.mlp_in, inner_size), settings.has_mlp_bias, part_to_outputs=mlp_in_outputs
        )
        is_gated = len(names.mlp_in) == 2
        self._activation = (gated_activation if is_gated else linear_activation)(settings.activation)
        self._mlp_out = linear(inner_size, {names.mlp_out: size}, settings.has_mlp_bias, inputs=own)

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots(
            [
                self._attention_norm,
                self._qkv,
                self._attention_out,
                self.cross,
                self._mlp_norm,
                self._mlp_in,
                self._mlp_out,
            ]
        )

    def __call__(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        step: LayerStep,
    ) -> torch.Tensor:  # [num_queries, hidden_size]
        if not self._is_norm_first:
            attended = self._attend(hidden, step)
            hidden = step.metadata.of_queries(hidden)
            total = self._attention_norm(self._attention_out(attended, residual=hidden))
            total = self._feed_forward(total, total)
            return total if self._mlp_norm is None else self._mlp_norm(total)
        normed = self._attention_norm(hidden)
        attended = self._attend(normed, step)
        hidden = step.metadata.of_queries(hidden)
        total = self._attention_out(attended, residual=hidden)
        if self.cross is not None and step.metadata.cross is not None:
            total = self.cross(total, step.kv_cache[2:], step.metadata.cross)
        if self._mlp_norm is None:
            normed = step.metadata.of_queries(normed)
        else:
            normed = self._mlp_norm(hidden if self._is_parallel else total)
        return self._feed_forward(normed, total)

    def _feed_forward(self, normed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._mlp_out(self._mlp_in(normed, self._activation), residual=residual)

    def _attend(
        self,
        normed: torch.Tensor,
        step: LayerStep,
    ) -> torch.Tensor:
        query, key, value = (
            part.view(part.shape[0], -1, self._head_dim)
            for part in self._qkv(normed).split([self._query_size, self._kv_size, self._kv_size], dim=-1)
        )
        if self._rotate is None:
            own = step if self.cross is None else step._replace(kv_cache=step.kv_cache[:2])
            return self._attention(query, key, value, own)
        heads = (query, key, value)
        return self._attention.rotate_and_attend(self._rotate, *heads, step)


def _make_qkv(
    prefix: str, settings: BlockSettings, split: HeadSplit, dtype: torch.dtype, device: torch.device
) -> Linear:
    names = [prefix + name for name in settings.names.qkv]
    orders = zip(names, settings.qkv_row_orders, strict=False)
    return Linear(
        settings.hidden_size,
        split.parts(names),
        has_bias=settings.has_qkv_bias,
        dtype=dtype,
        device=device,
        is_transposed=settings.is_transposed,
        part_to_row_order={name: order for name, order in orders if order is not None},
        parts_without_bias=[prefix + name for name in settings.parts_without_bias],
        part_to_outputs=split.outputs(names),
    )


def ungrouped_rows(num_groups: int, queries_per_group: int, head_dim: int) -> torch.Tensor:
    """Row order that separates queries, keys and values, which the checkpoint stores group by group."""
    rows = torch.arange(num_groups * (queries_per_group + 2) * head_dim).view(num_groups, -1, head_dim)
    parts = rows[:, :-2], rows[:, -2], rows[:, -1]
    return torch.cat([part.reshape(-1) for part in parts])
