"""Groups of layers that share block tables, and the storage of all groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from llmstack_kv_cache import KVCacheGroup
from llmstack_kv_cache.storage import allocate_block_storage
from llmstack_model_runner.models.kv_spec import LayerKVSpec, ModelKVSpec
from llmstack_types import KVCacheGroupSpec, KVCacheSpec, ModelRunnerConfig

Storage = list[tuple[torch.Tensor, ...]]
"""The tensors of each layer, each [num_blocks, ...] with the shape of one block behind it."""

_MAX_NUM_GROUPS = 8
"""A request has a block table per group: more of them cost the scheduler more than their storage saves."""


def group_layers(
    layers: Sequence[LayerKVSpec], max_model_len: int, block_size: int, dtype: str
) -> tuple[KVCacheGroupSpec, ...]:
    """Groups of layers with equal windows; one where no request outgrows a window.

    All groups have the same number of layers, since they share the storage; where the numbers do not divide, the last
    group of a window has fewer and leaves a part of its blocks unused. The size is the one that leaves the least.

    `block_size`: Tokens per block. `dtype`: The type of stored numbers.

    Raises:
        ValueError: Layers have tensors of different shapes, whose blocks cannot share a storage.
    """
    if not layers:
        return ()
    first = layers[0]
    if any((layer.tensors, layer.kind) != (first.tensors, first.kind) for layer in layers):
        raise ValueError("the layers keep tensors of different shapes, which is not supported")
    tensors = first.block_tensors(block_size, dtype)
    window_to_layers: dict[int | None, list[int]] = {}
    for number, layer in enumerate(layers):
        window = layer.sliding_window
        is_outgrown = window is not None and window < max_model_len
        window_to_layers.setdefault(window if is_outgrown else None, []).append(number)
    size = _choose_size([len(numbers) for numbers in window_to_layers.values()])
    return tuple(
        KVCacheGroupSpec(tuple(numbers[start : start + size]), window, "window" if window else first.kind, tensors)
        for window, numbers in window_to_layers.items()
        for start in range(0, len(numbers), size)
    )


def group_stage_layers(
    spec: ModelKVSpec, max_model_len: int, block_size: int, dtype: str
) -> tuple[KVCacheGroupSpec, ...]:
    """The groups of the whole model, each with this stage's layers, by their numbers in the stage.

    All stages have equal groups, since they share the scheduler's block tables; a group may have no layer here.
    """
    own = range(spec.first_layer, spec.first_layer + spec.num_layers)
    return tuple(
        replace(group, layers=tuple(layer - own.start for layer in group.layers if layer in own))
        for group in group_layers(spec.model_layers or spec.layers, max_model_len, block_size, dtype)
    )


def join_groups(groups: Sequence[KVCacheGroupSpec]) -> tuple[KVCacheGroupSpec, ...]:
    """One group of all layers, which keep all blocks."""
    layers = sorted(layer for group in groups for layer in group.layers)
    return (
        (KVCacheGroupSpec(tuple(layers), tensors=groups[0].tensors),)
        if any(group.sliding_window for group in groups)
        else tuple(groups)
    )


def num_storage_layers(spec: KVCacheSpec) -> int:
    """Layers of the storage, which the groups share: those of the largest group."""
    return max((len(group.layers) for group in spec.groups), default=0)


def num_storage_tensors(spec: KVCacheSpec) -> int:
    """Tensors of the storage on a GPU."""
    return max((len(group.layers) * len(group.tensors) for group in spec.groups), default=0)


def allocate_storage(spec: KVCacheSpec, num_blocks: int, device: torch.device | str) -> Storage:
    """Zeroed tensors of `num_blocks` blocks, which all groups share."""
    if not spec.groups:
        return []
    largest = max(spec.groups, key=lambda group: len(group.layers))
    layer = [(tensor.shape, getattr(torch, tensor.dtype)) for tensor in largest.tensors]
    return allocate_block_storage([layer] * len(largest.layers), num_blocks, device)


def by_layer(storage: Storage, spec: KVCacheSpec) -> Storage:
    """The tensors of each layer of the model: the n-th layers of all groups have the same ones."""
    layer_to_place = {layer: place for group in spec.groups for place, layer in enumerate(group.layers)}
    return [storage[layer_to_place[layer]] for layer in range(spec.num_layers)]


def num_blocks_needed(spec: KVCacheSpec, num_tokens: int, max_num_step_tokens: int) -> int:
    """Most blocks that one request of `num_tokens` tokens holds at once."""
    groups = [KVCacheGroup("", group.sliding_window) for group in spec.table_groups] or [KVCacheGroup("")]
    return sum(group.num_blocks_needed(num_tokens, 0, max_num_step_tokens, spec.block_size) for group in groups)


def describe_groups(groups: Sequence[KVCacheGroupSpec], *, is_enabled: bool) -> str:
    """For logs: which layers free blocks that their windows have passed; empty where no layer could."""
    if not any(group.sliding_window for group in groups):
        return ""
    if not is_enabled:
        return "all layers keep all blocks: --disable-hybrid-kv-cache-manager"
    kinds: dict[int | None, int] = {}
    for group in groups:
        kinds[group.sliding_window] = kinds.get(group.sliding_window, 0) + len(group.layers)
    layers = ", ".join(
        f"{number} with {'full attention' if window is None else f'a window of {window}'}"
        for window, number in kinds.items()
    )
    return f"layers: {layers}; {len(groups)} block tables"


def _choose_size(numbers: Sequence[int]) -> int:
    """Layers per group for kinds of so many layers: few groups, and little unused storage."""

    def cost(size: int) -> tuple[int, int]:
        num_groups = sum(-(-number // size) for number in numbers)
        return num_groups * size - sum(numbers), num_groups

    sizes = [size for size in range(1, max(numbers) + 1) if cost(size)[1] <= max(_MAX_NUM_GROUPS, len(numbers))]
    return min(sizes, key=cost)


def max_positions(config: ModelRunnerConfig, spec: KVCacheSpec, num_blocks: int) -> int:
    """The most positions of one request: what the KV cache holds, unless windows free all that they have passed."""
    if spec.table_groups and all(group.sliding_window for group in spec.groups):
        return config.max_model_len
    return min(config.max_model_len, num_blocks * spec.block_size)
