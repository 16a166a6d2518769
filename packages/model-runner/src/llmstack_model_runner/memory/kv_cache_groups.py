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
    """Groups of layers with equal windows, one where no request outgrows a window, and one of all layers with a state.

    The first have the same number of layers, since they share the storage; where the numbers do not divide, the last
    group of a window has fewer and leaves a part of its blocks unused. The size is the one that leaves the least.

    `block_size`: Tokens per block. `dtype`: The type of stored numbers.

    Raises:
        ValueError: Layers have tensors of different shapes, whose blocks cannot share a storage.
    """
    with_states = [(number, layer) for number, layer in enumerate(layers) if layer.kind == "state"]
    others = [(number, layer) for number, layer in enumerate(layers) if layer.kind != "state"]
    if not others:
        return ()
    first = others[0][1]
    states = tuple(layer.states for _, layer in with_states)
    if len(set(states)) > 1 or any((one.tensors, one.kind) != (first.tensors, first.kind) for _, one in others):
        raise ValueError("the layers keep tensors of different shapes, which is not supported")
    tensors = first.block_tensors(block_size, dtype)
    window_to_layers: dict[int | None, list[int]] = {}
    for number, layer in others:
        window = layer.sliding_window
        is_outgrown = window is not None and window < max_model_len
        window_to_layers.setdefault(window if is_outgrown else None, []).append(number)
    size = _choose_size([len(numbers) for numbers in window_to_layers.values()])
    groups = [
        KVCacheGroupSpec(tuple(numbers[start : start + size]), window, "window" if window else first.kind, tensors)
        for window, numbers in window_to_layers.items()
        for start in range(0, len(numbers), size)
    ]
    if with_states:
        numbers = tuple(number for number, _ in with_states)
        groups.append(
            KVCacheGroupSpec(numbers, kind="state", tensors=with_states[0][1].block_tensors(block_size, dtype))
        )
    return tuple(groups)


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
    """One group of all layers without a state, which keep all blocks."""
    if not any(group.sliding_window for group in groups):
        return tuple(groups)
    with_states = tuple(group for group in groups if group.kind == "state")
    layers = sorted(layer for group in groups if group.kind != "state" for layer in group.layers)
    return (KVCacheGroupSpec(tuple(layers), tensors=groups[0].tensors), *with_states)


def num_storage_layers(spec: KVCacheSpec) -> int:
    """Layers of the storage, which the groups share: those of the largest group."""
    return max((len(group.layers) for group in spec.kv_groups), default=0)


def num_storage_tensors(spec: KVCacheSpec) -> int:
    """Tensors of the storage on a GPU."""
    return max((len(group.layers) * len(group.tensors) for group in spec.kv_groups), default=0)


def allocate_storage(spec: KVCacheSpec, num_blocks: int, device: torch.device | str) -> Storage:
    """Zeroed tensors of `num_blocks` blocks, which all groups share."""
    if not spec.kv_groups:
        return []
    return _allocate_layers(max(spec.kv_groups, key=lambda group: len(group.layers)), num_blocks, device)


def allocate_states(spec: KVCacheSpec, num_state_blocks: int, device: torch.device | str) -> Storage:
    """Zeroed tensors of so many state blocks, for each layer with a state; block 0 is to stay zero."""
    return [] if spec.state_group is None else _allocate_layers(spec.state_group, num_state_blocks, device)


def _allocate_layers(group: KVCacheGroupSpec, num_blocks: int, device: torch.device | str) -> Storage:
    layer = [(tensor.shape, getattr(torch, tensor.dtype)) for tensor in group.tensors]
    return allocate_block_storage([layer] * len(group.layers), num_blocks, device)


def by_layer(storage: Storage, spec: KVCacheSpec, states: Sequence[tuple[torch.Tensor, ...]] = ()) -> Storage:
    """The tensors of each layer of the model: the n-th layers of all groups have the same ones, but those with a state.

    `states`: The storage of those.
    """
    layer_to_tensors = {
        layer: tensors
        for group in spec.groups
        for layer, tensors in zip(group.layers, states if group.kind == "state" else storage, strict=False)
    }
    return [layer_to_tensors[layer] for layer in range(spec.num_layers)]


def kv_layers(layers: Storage, spec: KVCacheSpec) -> Storage:
    """The tensors of the layers without a state."""
    return [layers[number] for number in sorted(layer for group in spec.kv_groups for layer in group.layers)]


def num_blocks_needed(spec: KVCacheSpec, num_tokens: int, max_num_step_tokens: int) -> int:
    """Most blocks that one request of `num_tokens` tokens holds at once."""
    groups = [KVCacheGroup("", group.sliding_window) for group in spec.table_groups] or [KVCacheGroup("")]
    return sum(group.num_blocks_needed(num_tokens, 0, max_num_step_tokens, spec.block_size) for group in groups)


def describe_groups(groups: Sequence[KVCacheGroupSpec], *, is_enabled: bool) -> str:
    """For logs: layers with a state, or which free blocks that their windows have passed; empty where none are."""
    states = next((group for group in groups if group.kind == "state"), None)
    if states is not None:
        num_others = sum(len(group.layers) for group in groups) - len(states.layers)
        return (
            f"layers: {len(states.layers)} with a state, {num_others} with attention; "
            f"{states.bytes_per_block} bytes per state, and prefix hits end at a block boundary where one is kept"
        )
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
    if spec.table_groups and all(group.sliding_window for group in spec.table_groups):
        return config.max_model_len
    return min(config.max_model_len, num_blocks * spec.block_size)
