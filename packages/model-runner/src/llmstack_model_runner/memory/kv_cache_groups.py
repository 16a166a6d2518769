"""Groups of layers with block tables of their own, for sliding windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmstack_kv_cache import KVCacheGroup
from llmstack_kv_cache.storage import allocate_kv_storage
from llmstack_model_runner.models import ModelKVSpec
from llmstack_types import KVCacheGroupSpec, KVCacheSpec, ModelRunnerConfig

Storage = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""

_MAX_NUM_GROUPS = 8
"""A request has a block table per group: more of them cost the scheduler more than their storage saves."""


def group_layers(sliding_windows: Sequence[int | None], max_model_len: int) -> tuple[KVCacheGroupSpec, ...]:
    """Groups of layers with equal windows; none where no request outgrows a window.

    All groups have the same number of layers, since they share the storage; where the numbers do not divide, the last
    group of a window has fewer and leaves a part of its blocks unused. The size is the one that leaves the least.
    """
    window_to_layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(sliding_windows):
        is_outgrown = window is not None and window < max_model_len
        window_to_layers.setdefault(window if is_outgrown else None, []).append(layer)
    if window_to_layers.keys() <= {None}:
        return ()
    size = _choose_size([len(layers) for layers in window_to_layers.values()])
    return tuple(
        KVCacheGroupSpec(tuple(layers[start : start + size]), window)
        for window, layers in window_to_layers.items()
        for start in range(0, len(layers), size)
    )


def group_stage_layers(spec: ModelKVSpec, max_model_len: int) -> tuple[KVCacheGroupSpec, ...]:
    """The groups of the whole model, each with this stage's layers, by their numbers in the stage.

    All stages have equal groups, since they share the scheduler's block tables; a group may have no layer here.
    """
    own = range(spec.first_layer, spec.first_layer + spec.num_layers)
    return tuple(
        KVCacheGroupSpec(tuple(layer - own.start for layer in group.layers if layer in own), group.sliding_window)
        for group in group_layers(spec.model_windows or spec.sliding_windows, max_model_len)
    )


def num_storage_layers(spec: KVCacheSpec) -> int:
    """Layers of the storage, which the groups share: those of the largest group."""
    return max((len(group.layers) for group in spec.groups), default=spec.num_layers)


def allocate_storage(spec: KVCacheSpec, num_blocks: int, device: torch.device | str) -> Storage:
    """Zeroed keys and values of `num_blocks` blocks, which all groups share."""
    dtype = getattr(torch, spec.kv_cache_dtype)
    shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
    return allocate_kv_storage(num_storage_layers(spec), *shape, dtype, device)


def by_layer(storage: Storage, spec: KVCacheSpec) -> Storage:
    """Keys and values for each layer of the model: the n-th layers of all groups have the same tensors."""
    if not spec.groups:
        return storage
    layer_to_place = {layer: place for group in spec.groups for place, layer in enumerate(group.layers)}
    return [storage[layer_to_place[layer]] for layer in range(spec.num_layers)]


def num_blocks_needed(spec: KVCacheSpec, num_tokens: int, max_num_step_tokens: int) -> int:
    """Most blocks that one request of `num_tokens` tokens holds at once."""
    groups = [KVCacheGroup("", group.sliding_window) for group in spec.groups] or [KVCacheGroup("")]
    return sum(group.num_blocks_needed(num_tokens, 0, max_num_step_tokens, spec.block_size) for group in groups)


def describe_groups(groups: Sequence[KVCacheGroupSpec], *, is_enabled: bool) -> str:
    """For logs: which layers free blocks that their windows have passed; empty where no layer could."""
    if not groups:
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
    if spec.groups and all(group.sliding_window for group in spec.groups):
        return config.max_model_len
    return min(config.max_model_len, num_blocks * spec.block_size)
