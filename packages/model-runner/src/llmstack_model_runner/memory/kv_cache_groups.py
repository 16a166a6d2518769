"""Groups of layers that share block tables, and the storage of all groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from llmstack_kv_cache import KVCacheGroup
from llmstack_kv_cache.storage import allocate_block_storage
from llmstack_model_runner.models.kv_spec import LayerKVSpec, ModelKVSpec
from llmstack_types import KVCacheGroupSpec, KVCacheSpec, KVTensorSpec, ModelRunnerConfig

Storage = list[tuple[torch.Tensor, ...]]
"""The tensors of each layer, each [num_blocks, ...] with the shape of one block behind it."""

_MAX_NUM_GROUPS = 8
"""A request has a block table per group: more of them cost the scheduler more than their storage saves."""


def group_layers(
    layers: Sequence[LayerKVSpec], max_model_len: int, block_size: int, dtype: str
) -> tuple[KVCacheGroupSpec, ...]:
    """Groups of layers with equal windows and tensors, and one of all layers with a state.

    A window that no request outgrows is none. All groups but that of states share the storage, so their blocks should
    have the same size: each has as many layers as fit, and where the numbers do not divide, the last group of a kind
    has fewer and leaves a part of its blocks unused. The size is the one that leaves the least.

    `block_size`: Tokens per block. `dtype`: The type of stored numbers.

    Raises:
        ValueError: Layers have states of different shapes.
    """
    with_states = [(number, layer) for number, layer in enumerate(layers) if layer.kind == "state"]
    others = [(number, layer) for number, layer in enumerate(layers) if layer.kind != "state"]
    if len({layer.states for _, layer in with_states}) > 1:
        raise ValueError("the layers keep states of different shapes, which is not supported")
    kind_to_layers: dict[KVCacheGroupSpec, list[int]] = {}
    for number, layer in others:
        window = layer.sliding_window
        if window is not None and window >= max_model_len:
            window = None
        tensors = layer.block_tensors(block_size, dtype)
        kind = KVCacheGroupSpec((), window, "window" if window else layer.kind, tensors)
        kind_to_layers.setdefault(kind, []).append(number)
    sizes = [sum(tensor.num_bytes for tensor in kind.tensors) for kind in kind_to_layers]
    block_bytes = _choose_block_bytes([len(numbers) for numbers in kind_to_layers.values()], sizes) if sizes else 0
    groups = [
        replace(kind, layers=tuple(numbers[start : start + block_bytes // size]))
        for (kind, numbers), size in zip(kind_to_layers.items(), sizes, strict=True)
        for start in range(0, len(numbers), block_bytes // size)
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
    """Groups of all layers without a state, which keep all blocks: one for layers with equal tensors."""
    if not any(group.sliding_window for group in groups):
        return tuple(groups)
    tensors_to_layers: dict[tuple[KVTensorSpec, ...], list[int]] = {}
    for group in groups:
        if group.kind != "state":
            tensors_to_layers.setdefault(group.tensors, []).extend(group.layers)
    joined = [KVCacheGroupSpec(tuple(sorted(own)), tensors=tensors) for tensors, own in tensors_to_layers.items()]
    return (*joined, *(group for group in groups if group.kind == "state"))


def has_unlike_groups(spec: KVCacheSpec) -> bool:
    """Whether groups have different tensors, so that they share whole blocks of bytes only."""
    return len({group.tensors for group in spec.kv_groups}) > 1


def token_bytes(spec: KVCacheSpec) -> int:
    """Bytes of a token's keys and values in all layers, those with a state counted as the others are on average."""
    num_layers = sum(len(group.layers) for group in spec.kv_groups)
    own_bytes = sum(group.bytes_per_block for group in spec.kv_groups)
    return own_bytes * spec.num_layers // (max(num_layers, 1) * spec.block_size)


def num_storage_tensors(spec: KVCacheSpec) -> int:
    """Tensors of the storage on a GPU."""
    return max((len(group.layers) * len(group.tensors) for group in spec.kv_groups), default=0)


def allocate_storage(spec: KVCacheSpec, num_blocks: int, device: torch.device | str) -> Storage:
    """Zeroed tensors of `num_blocks` blocks, which all groups share; of unlike groups, one tensor of bytes.

    Without any layer of keys and values beside states a block has one byte, so that copies of blocks are what they are
    elsewhere.
    """
    if not spec.groups:
        return []
    if has_unlike_groups(spec):
        size = spec.bytes_per_block - spec.draft_bytes_per_block
        return allocate_block_storage([[((size,), torch.uint8)]], num_blocks, device)
    largest = max(spec.kv_groups, key=lambda group: len(group.layers), default=None)
    storage = [] if largest is None else _allocate_layers(largest, num_blocks, device)
    return storage or allocate_block_storage([[((1,), torch.uint8)]], num_blocks, device)


def allocate_states(spec: KVCacheSpec, num_state_blocks: int, device: torch.device | str) -> Storage:
    """Zeroed tensors of so many state blocks, for each layer with a state; block 0 is to stay zero."""
    return [] if spec.state_group is None else _allocate_layers(spec.state_group, num_state_blocks, device)


def _allocate_layers(group: KVCacheGroupSpec, num_blocks: int, device: torch.device | str) -> Storage:
    layer = [(tensor.shape, getattr(torch, tensor.dtype)) for tensor in group.tensors]
    return allocate_block_storage([layer] * len(group.layers), num_blocks, device)


def by_layer(storage: Storage, spec: KVCacheSpec, states: Sequence[tuple[torch.Tensor, ...]] = ()) -> Storage:
    """The tensors of each layer of the model: the n-th layers of all groups have the same ones, but those with a state.

    Each of several unlike groups divides the bytes of a block as its layers need.

    `states`: The storage of those.
    """
    layer_to_tensors: dict[int, tuple[torch.Tensor, ...]] = {}
    for group in spec.groups:
        places = states if group.kind == "state" else storage
        if group.kind != "state" and has_unlike_groups(spec):
            places = _divide(storage[0][0], group)
        layer_to_tensors.update(zip(group.layers, places, strict=False))
    return [layer_to_tensors[layer] for layer in range(spec.num_layers)]


def _divide(blocks: torch.Tensor, group: KVCacheGroupSpec) -> Storage:
    """The tensors of a group's layers in blocks of bytes: [num_blocks, bytes_per_block], which may be more."""
    sizes = [tensor.num_bytes for tensor in group.tensors] * len(group.layers)
    parts = iter(blocks[:, : group.bytes_per_block].split(sizes, dim=1))
    return [
        tuple(next(parts).view(getattr(torch, own.dtype)).unflatten(1, own.shape) for own in group.tensors)
        for _ in group.layers
    ]


def block_layers(storage: Storage, layers: Storage, spec: KVCacheSpec) -> Storage:
    """The tensors that make up a block: those of the layers without a state, or those that groups share."""
    if spec.table_groups:
        return storage
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


def _choose_block_bytes(numbers: Sequence[int], sizes: Sequence[int]) -> int:
    """Bytes of a block of every group, for kinds of so many layers of these bytes each.

    Few groups, and little unused storage.
    """

    def cost(block_bytes: int) -> tuple[int, int]:
        num_groups = sum(-(-number // (block_bytes // size)) for number, size in zip(numbers, sizes, strict=True))
        used = sum(number * size for number, size in zip(numbers, sizes, strict=True))
        return num_groups * block_bytes - used, num_groups

    most = max(_MAX_NUM_GROUPS, len(numbers))
    candidates = {count * size for number, size in zip(numbers, sizes, strict=True) for count in range(1, number + 1)}
    fitting = [each for each in sorted(candidates) if each >= max(sizes) and cost(each)[1] <= most]
    return min(fitting, key=cost)


def max_positions(config: ModelRunnerConfig, spec: KVCacheSpec, num_blocks: int) -> int:
    """The most positions of one request: what the KV cache holds, unless windows free all that they have passed."""
    if spec.table_groups and all(group.sliding_window for group in spec.table_groups):
        return config.max_model_len
    return min(config.max_model_len, num_blocks * spec.block_size)
