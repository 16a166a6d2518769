"""Attention of one layer over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from llmstack_kernels.paged_attention import AttentionInputs, paged_attention, plan_paged_attention
from llmstack_kernels.reshape_and_cache import reshape_and_cache
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, AttentionPlans, LayerCache, LayerStep
from llmstack_model_runner.layers.block_attention import attend_in_blocks_
from llmstack_model_runner.layers.head_rotation import HeadRotation
from llmstack_model_runner.layers.kv_scales import KVScales
from llmstack_model_runner.layers.packing import packing
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightPart, WeightSlot


class Attention:
    """Scaled softmax attention over `sliding_window` tokens, or over the whole context if None.

    A soft cap, ALiBi slopes and sinks apply as `paged_attention` defines. Constructed inside `packed_linears` with
    `is_batch_invariant`, the layer computes decodes like prompts.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        sliding_window: int | None = None,
        *,
        device: torch.device,
        soft_cap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,  # [num_heads] float32
        has_sinks: bool = False,
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.sliding_window = sliding_window
        self.kv_scales = KVScales(num_kv_heads, device)
        self._scale = scale
        self._soft_cap = soft_cap
        self._alibi_slopes = alibi_slopes
        self._sinks = torch.zeros(num_heads, device=device) if has_sinks else None
        self._is_batch_invariant = packing().is_batch_invariant

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        step: LayerStep,
    ) -> torch.Tensor:  # [num_queries, num_heads * head_dim]
        key_cache, value_cache = step.kv_cache
        scales = self.kv_scales.of(key_cache)
        reshape_and_cache(key, value, key_cache, value_cache, step.metadata.slot_mapping, *scales)
        return self._attend(query, scales, step)

    def sink_slots(self, name: str, num_heads: int, heads: range) -> dict[str, WeightSlot]:
        """The slot of the sinks of all heads, of which this layer has `heads`; none where it has no sinks."""
        if self._sinks is None:
            return {}
        part = None if len(heads) == num_heads else WeightPart(0, (heads,))
        return {name: WeightSlot((num_heads,), self._load_sinks, WeightKind.BIAS, part=part)}

    def _load_sinks(self, tensor: torch.Tensor) -> None:
        if self._sinks is not None:
            self._sinks.copy_(tensor)

    def rotate_and_attend(
        self,
        rotate: HeadRotation,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        step: LayerStep,
    ) -> torch.Tensor:  # [num_queries, num_heads * head_dim]
        """Applies RoPE, writes keys and values to the cache, then attends.

        On a GPU one kernel rotates the keys and writes them to their slots.
        """
        scales = self.kv_scales.of(step.kv_cache[0])
        query = rotate(step.positions, query, key, value, step.kv_cache, step.metadata.slot_mapping, scales)
        return self._attend(query, scales, step)

    def read(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        step: LayerStep,
    ) -> torch.Tensor:  # [num_queries, num_heads * head_dim]
        """Attends to what another layer has written; nothing is written."""
        return self._attend(query, self.kv_scales.of(step.kv_cache[0]), step)

    def _attend(
        self,
        query: torch.Tensor,
        scales: tuple[torch.Tensor | None, torch.Tensor | None],
        step: LayerStep,
    ) -> torch.Tensor:
        key_cache, value_cache = step.kv_cache
        metadata = step.metadata
        key_scale, value_scale = scales
        out = paged_attention(
            AttentionInputs(
                metadata.of_queries(query),
                key_cache,
                value_cache,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_tables,
                self._scale,
                query_start_loc_list=metadata.query_start_loc_list,
                seq_lens_list=metadata.seq_lens_list,
                max_query_len=metadata.max_query_len,
                sliding_window=self.sliding_window,
                soft_cap=self._soft_cap,
                alibi_slopes=self._alibi_slopes,
                sinks=self._sinks,
                key_scale=key_scale,
                value_scale=value_scale,
                plan=step.plans.get(self.sliding_window),
                decodes_as_prefills=self._is_batch_invariant,
            )
        )
        # Those of the last layer that have no use are left out; a block's last token sees no more than a causal one.
        if metadata.vectors is not None and metadata.vectors.blocks and metadata.queries is None:
            if self._soft_cap is not None or self._alibi_slopes is not None or self._sinks is not None:
                raise ValueError("tokens of a picture attend to each other without soft caps, slopes or sinks only")
            attend_in_blocks_(out, query, step.kv_cache, scales, metadata, self._scale, self.sliding_window)
        return out.view(-1, self.num_heads * self.head_dim)


def alibi_slopes(num_heads: int) -> torch.Tensor:  # [num_heads] float32
    """ALiBi's slope of each head (arXiv 2108.12409).

    Powers of one base; heads past the largest power of two take every other slope of twice as many heads.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2.0 ** (-4 * (2 * head + 1) / whole) for head in range(num_heads - whole)]
    return torch.tensor(slopes)


def plan_layers(
    metadata: AttentionMetadata,
    kv_caches: Sequence[LayerCache],
    sliding_windows: Sequence[int | None],
    first_attention: int | None = 0,
    *,
    has_readers: bool = False,
) -> list[tuple[AttentionMetadata, AttentionPlans]]:
    """For each layer, whose windows are given, its group's metadata and its plans.

    `first_attention`: The first layer with attention; None where there is no such layer.
    `has_readers`: Later layers read what these write, so that the last one computes all tokens too.
    """
    if first_attention is None:
        return [(metadata, {})] * len(sliding_windows)
    planned = _plan_whole_layers(metadata, kv_caches, sliding_windows, first_attention)
    last_layer = planned[-1][0].last_layer
    if last_layer is not None and not has_readers:
        number = len(planned) - 1 if metadata.groups and metadata.layer_to_group[-1] is not None else first_attention
        planned[-1] = last_layer, plan_attention(last_layer, kv_caches[number][0], sliding_windows[-1:])
    return planned


def _plan_whole_layers(
    metadata: AttentionMetadata,
    kv_caches: Sequence[LayerCache],
    sliding_windows: Sequence[int | None],
    first_attention: int,
) -> list[tuple[AttentionMetadata, AttentionPlans]]:
    if not metadata.groups:  # all layers with attention have one shape
        plans = plan_attention(metadata, kv_caches[first_attention][0], sliding_windows)
        return [(metadata, plans)] * len(sliding_windows)
    layer_to_group = metadata.layer_to_group
    windows: list[set[int | None]] = [set() for _ in metadata.groups]
    for group, window in zip(layer_to_group, sliding_windows, strict=True):
        if group is not None:
            windows[group].add(window)
    planned = [
        (group, plan_attention(group, kv_caches[layer_to_group.index(number)][0], own) if own else {})
        for number, (group, own) in enumerate(zip(metadata.groups, windows, strict=True))
    ]
    return [planned[group or 0] for group in layer_to_group]  # of a layer with a state any has the states


def plan_attention(
    metadata: AttentionMetadata, key_cache: torch.Tensor, sliding_windows: Iterable[int | None]
) -> AttentionPlans:
    """One plan per distinct sliding window, shared by all layers that use it."""
    return {
        window: plan_paged_attention(
            key_cache,
            metadata.block_tables,
            query_start_loc_list=metadata.query_start_loc_list,
            seq_lens_list=metadata.seq_lens_list,
            sliding_window=window,
        )
        for window in set(sliding_windows)
    }
