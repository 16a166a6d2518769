"""Numbers of GGUF files, reduced to weight layouts without rounding.

A block of ggml has the numbers of a run of inputs of one output. Formats with a smallest value in a group (Q2_K, Q4_1,
Q5_1, Q4_K, Q5_K) mean `number * scale + smallest`, so their zero point is a float. The layouts of blocks are those of
`ggml-common.h`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from llmstack_gguf import (
    PROJECTOR,
    ROPE_TENSORS,
    GGUFError,
    Header,
    Target,
    TensorInfo,
    read_header,
    read_model,
    target_of,
)
from llmstack_kernels.linear import BLOCK_TYPES, AnyStoredWeight, BlockWeight, StoredWeight, join_stored
from llmstack_model_runner.checkpoint_formats.floats import mxfp4_of_numbers
from llmstack_model_runner.checkpoint_formats.gguf_pictures import read_pictures
from llmstack_model_runner.checkpoint_formats.head_rows import halves_of_heads
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight

_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EMBEDDINGS, _HEAD = "token_embd.weight", "output.weight"
_TABLES = (_EMBEDDINGS, "position_embd.weight", "per_layer_token_embd.weight")
"""May have billions of numbers, and models keep a copy in their own type."""
_HEAD_NAME = "lm_head.weight"
_NUMBERS_AT_ONCE = 1 << 24
"""Numbers that are unpacked together; tables of tokens have billions."""
_IQ4_VALUES = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)
"""The values of the 16 numbers of IQ4_NL and IQ4_XS."""


def read_gguf(paths: Sequence[Path], head_dim: int) -> Iterator[tuple[str, UnreadWeight]]:
    """The tensors of a model of GGUF files under the names that repositories of Hugging Face have.

    Where the output head shares the token embeddings, it is given too, and keeps their few bits. `head_dim` is for the
    order of rows of queries and keys. The last file may be an encoder.

    Raises:
        ValueError: The file is damaged, or a scale is no finite number.
    """
    try:
        beside = read_header(paths[-1]) if len(paths) > 1 else None
        if beside is not None and beside.architecture == PROJECTOR:
            yield from read_pictures(beside, partial(_read_dense, _mapped(paths[-1]), beside))
            paths = paths[:-1]
        header = read_model(paths)
        targets = {name: target_of(header, name) for name in header.tensors if name not in ROPE_TENSORS}
    except GGUFError as error:
        raise ValueError(str(error)) from None
    data = [_mapped(path) for path in paths]
    for name, target in targets.items():
        for own_name, info in _parts(header, name, target):
            read: Callable[[], torch.Tensor | AnyStoredWeight]
            read = partial(_read_placed, data[info.file], name, info, target, head_dim)
            if target.is_stack:
                read = partial(_read_stack, data, header, name, target)
            elif target.form == "products":
                read = partial(_read_products, data, header, name, target.partner)
            if name == _EMBEDDINGS and _HEAD not in header.tensors:
                yield _HEAD_NAME, UnreadWeight(partial(_copied, read))
            yield own_name, UnreadWeight(read, is_table=name in _TABLES)


def _read_dense(data: torch.Tensor, header: Header, name: str) -> torch.Tensor:
    found = _read(data, name, header.tensors[name])
    return found.dequantize(torch.float32) if isinstance(found, AnyStoredWeight) else found


def _mapped(path: Path) -> torch.Tensor:
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # ends with the last tensor that looks into it
    return torch.frombuffer(view, dtype=torch.uint8)


def _copied(read: Callable[[], torch.Tensor | AnyStoredWeight]) -> torch.Tensor | AnyStoredWeight:
    """A layer may keep what it gets: of a table in full precision that is a copy."""
    weight = read()
    return weight.clone() if isinstance(weight, torch.Tensor) else weight


def _read_placed(
    data: torch.Tensor, name: str, info: TensorInfo, target: Target, head_dim: int
) -> torch.Tensor | AnyStoredWeight:
    return _placed(_read(data, name, info), name, target, head_dim)


def _parts(header: Header, name: str, target: Target) -> Iterator[tuple[str, TensorInfo]]:
    """Name and place of each of a tensor's parts, which are the whole tensor or the experts."""
    info = header.tensors[name]
    if not target.is_experts:
        yield from ((own_name, info) for own_name in target.names)
        return
    num_bytes = info.num_bytes // len(target.names)
    shape = (math.prod(info.shape[:2]) // len(target.names), info.shape[2])
    for part, own_name in enumerate(target.names):
        yield own_name, TensorInfo(shape, info.type, info.start + part * num_bytes, num_bytes, info.file)


def _read(data: torch.Tensor, name: str, info: TensorInfo) -> torch.Tensor | AnyStoredWeight:
    content = data[info.start : info.start + info.num_bytes]
    if info.type.name in _DTYPES:
        # A copy, since keeping one tensor would keep the whole mapped file.
        content = content if name in _TABLES else content.clone()
        return content.view(_DTYPES[info.type.name]).view(info.shape)
    if len(info.shape) != 2:
        raise ValueError(f"{name[:128]} is quantized and no matrix.")
    num_outputs, num_inputs = info.shape
    blocks = content.view(num_outputs, num_inputs // info.type.block_size, info.type.block_bytes)
    try:
        if info.type.name in BLOCK_TYPES:
            weight = BlockWeight(info.type.name, (blocks,), _READERS[info.type.name])
            weight.check()
            return weight
        return _joined(_READERS[info.type.name], blocks, max(1, _NUMBERS_AT_ONCE // num_inputs))
    except ValueError as error:
        raise ValueError(f"{name[:128]} cannot be read as {info.type.name}: {error}") from None


def _joined(read: Callable[[torch.Tensor], StoredWeight], blocks: torch.Tensor, num_rows: int) -> StoredWeight:
    """A weight of blocks, of which so many rows are unpacked at a time: that takes several bytes of each number."""
    parts = [read(rows) for rows in blocks.split(num_rows)]
    joined = parts[0] if len(parts) == 1 else join_stored(parts)
    if not isinstance(joined, StoredWeight):
        raise ValueError("its rows are not stored alike.")
    return joined


def _read_stack(
    data: Sequence[torch.Tensor], header: Header, name: str, target: Target
) -> torch.Tensor | AnyStoredWeight:
    """All experts in one tensor: quantized weights one below the other, plain ones [experts, inputs, outputs]."""
    names = [name, target.partner] if target.partner else [name]
    parts = []
    for each in names:
        info = header.tensors[each]
        shape = info.shape if info.type.name in _DTYPES else (math.prod(info.shape[:-1]), info.shape[-1])
        parts.append(_read(data[info.file], each, replace(info, shape=shape)))
    first = parts[0]
    if isinstance(first, AnyStoredWeight):
        joined = join_stored([part for part in parts if isinstance(part, AnyStoredWeight)])
        if joined is None:
            raise ValueError(f"{name[:128]} and {target.partner[:128]} are not stored alike.")
        return joined if len(parts) == 1 else joined.rows(torch.arange(2 * first.shape[0]).view(2, -1).t().reshape(-1))
    plain = [part for part in parts if isinstance(part, torch.Tensor)]
    stacked = first if len(plain) == 1 else torch.stack(plain, 2).flatten(1, 2)
    return stacked.transpose(1, 2) if stacked.ndim == 3 else stacked


def _read_products(data: Sequence[torch.Tensor], header: Header, keys: str, values: str) -> torch.Tensor:
    """The products of keys [heads, rank, numbers] and of values [heads, numbers, rank] as rows of each head."""
    parts = []
    for name in (keys, values):
        info = header.tensors[name]
        found = _read(data[info.file], name, replace(info, shape=(math.prod(info.shape[:2]), info.shape[2])))
        dense = found.dequantize(torch.float32) if isinstance(found, AnyStoredWeight) else found.float()
        parts.append(dense.view(info.shape))
    return torch.cat((parts[0].transpose(1, 2), parts[1]), 1).flatten(0, 1)


def _placed(
    tensor: torch.Tensor | AnyStoredWeight, name: str, target: Target, head_dim: int
) -> torch.Tensor | AnyStoredWeight:
    """A tensor as repositories store it; quantized weights are [outputs, inputs] always."""
    if target.form:
        return _in_form(tensor, name, target.form)
    if target.is_offset and isinstance(tensor, torch.Tensor):
        return tensor.float() - 1
    if target.is_transposed and isinstance(tensor, torch.Tensor):
        return tensor.t()
    if target.qkv_heads is not None:
        return _in_order(tensor, _grouped_rows(tensor.shape[0], *target.qkv_heads))
    if not target.has_interleaved_heads:
        return tensor
    num_rows = tensor.shape[0]
    if num_rows % head_dim:
        raise ValueError(f"{name[:128]} has {num_rows} rows, which are no heads of {head_dim}.")
    return _in_order(tensor, halves_of_heads(num_rows, num_rows // head_dim, name))


def _in_form(tensor: torch.Tensor | AnyStoredWeight, name: str, form: str) -> torch.Tensor:
    """Numbers of a state space in the form of repositories."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name[:128]} is quantized, and only supported in full precision.")
    if form == "taps":
        return tensor.reshape(-1, 1, tensor.shape[-1])
    if form == "row":
        return tensor.view(1, -1)
    numbers = tensor.float()
    if form in ("flat", "log of negative"):
        numbers = numbers.flatten()
    elif form == "wide logs":
        numbers = numbers.reshape(1, 1, -1, 1)
    return numbers if form == "flat" else (-numbers).log()


def _in_order(tensor: torch.Tensor | AnyStoredWeight, order: torch.Tensor) -> torch.Tensor | AnyStoredWeight:
    return tensor.rows(order) if isinstance(tensor, AnyStoredWeight) else tensor[order]


def _grouped_rows(num_rows: int, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """The row of all queries, then keys, then values, for each row of groups: queries that share a key, key, value."""
    head_dim = num_rows // (num_heads + 2 * num_kv_heads)
    heads = torch.arange(num_rows).view(-1, head_dim).split([num_heads, num_kv_heads, num_kv_heads])
    return torch.cat([part.view(num_kv_heads, -1) for part in heads], 1).reshape(-1)


def _q8_0(blocks: torch.Tensor) -> StoredWeight:
    numbers = blocks[..., 2:] ^ 128
    return StoredWeight("int8", numbers.flatten(1), _halves(blocks, 0), 32)


def _q4_0(blocks: torch.Tensor) -> StoredWeight:
    return StoredWeight("int4", _nibbles(blocks[..., 2:]).flatten(1), _halves(blocks, 0), 32)


def _q4_1(blocks: torch.Tensor) -> StoredWeight:
    numbers = _nibbles(blocks[..., 4:])
    return _with_smallest("int4", numbers, _halves(blocks, 0).float(), _halves(blocks, 2).float(), 32)


def _q5_0(blocks: torch.Tensor) -> StoredWeight:
    numbers = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return StoredWeight("int8", (numbers + 112).flatten(1), _halves(blocks, 0), 32)  # 16 is zero


def _q5_1(blocks: torch.Tensor) -> StoredWeight:
    numbers = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _with_smallest("int8", numbers, _halves(blocks, 0).float(), _halves(blocks, 2).float(), 32)


def _mxfp4(blocks: torch.Tensor) -> StoredWeight:
    return mxfp4_of_numbers(_nibbles(blocks[..., 1:]).flatten(1), blocks[..., 0])


def _q2_k(blocks: torch.Tensor) -> StoredWeight:
    scales = (blocks[..., :16] & 15).float() * _halves(blocks, 80).float()[..., None]
    smallest = (blocks[..., :16] >> 4).float() * _halves(blocks, 82).float()[..., None]
    return _with_smallest("int4", _k_pairs(blocks[..., 16:80]), scales.flatten(1), -smallest.flatten(1), 16)


def _q3_k(blocks: torch.Tensor) -> StoredWeight:
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((blocks[..., None, :32] >> bits) & 1) << 2  # [..., 8 runs, 32]
    numbers = (_k_pairs(blocks[..., 32:96]) | high.flatten(-2)) + 4  # 4 is zero, and 8 is the layout's
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    low, upper = _nibbles(blocks[..., 96:104]), (blocks[..., None, 104:108] >> shifts) & 3  # of 16 scales
    own = (low | upper.flatten(-2) << 4).float() - 32
    scales = own * _halves(blocks, 108).float()[..., None]
    return StoredWeight("int4", numbers.flatten(1), scales.flatten(1), 16)


def _iq4_nl(blocks: torch.Tensor) -> StoredWeight:
    numbers = _nibbles(blocks[..., 2:]).flatten(1)
    return StoredWeight("table4", numbers, _halves(blocks, 0), 32, table=_IQ4_VALUES.clone())


def _iq4_xs(blocks: torch.Tensor) -> StoredWeight:
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)  # of eight scales
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = ((blocks[..., 2:4, None] >> shifts) & 3).flatten(-2)
    scales = ((low | high << 4).float() - 32) * _halves(blocks, 0).float()[..., None]
    numbers = _nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(1)
    return StoredWeight("table4", numbers, scales.flatten(1), 32, table=_IQ4_VALUES.clone())


def _q4_k(blocks: torch.Tensor) -> StoredWeight:
    scales, smallest = _k_scales(blocks)
    return _with_smallest("int4", _k_nibbles(blocks[..., 16:]), scales, smallest, 32)


def _q5_k(blocks: torch.Tensor) -> StoredWeight:
    scales, smallest = _k_scales(blocks)
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((blocks[..., None, 16:48] >> bits) & 1) << 4  # [..., 8 groups, 32]
    numbers = _k_nibbles(blocks[..., 48:]) | high.flatten(-2)
    return _with_smallest("int8", numbers, scales, smallest, 32)


def _q6_k(blocks: torch.Tensor) -> StoredWeight:
    low = blocks[..., :128].unflatten(-1, (2, 1, 2, 32))  # halves of the block, bits, runs of 32
    low = torch.cat((low & 15, low >> 4), -3).flatten(-3, -2)  # [..., 2, 4, 32]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3
    numbers = (low | high << 4).flatten(-3) + 96  # 32 is zero, and 128 is the layout's
    own = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = own * _halves(blocks, 208).float()[..., None]
    return StoredWeight("int8", numbers.flatten(1), scales.flatten(1), 16)


_READERS: Mapping[str, Callable[[torch.Tensor], StoredWeight]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """A float16 of each block: [outputs, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits: the low ones of all bytes, then the high ones."""
    packed = packed.contiguous()  # between the scales of blocks the two passes take twice as long
    return torch.cat((packed & 15, packed >> 4), -1)


def _k_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Numbers of two bits of each run of 32 bytes: the lowest ones of all its bytes, then the next."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    pairs: torch.Tensor = (packed.unflatten(-1, (2, 1, 32)) >> shifts) & 3
    return pairs.flatten(-3)


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits of each run of 32 bytes: the low ones of its bytes, then the high ones."""
    return _nibbles(packed.unflatten(-1, (4, 32))).flatten(-2)


def _fifth_bits(words: torch.Tensor) -> torch.Tensor:
    """The highest bits of 32 numbers, from four bytes: each 0 or 16."""
    bits = torch.arange(8, dtype=torch.uint8)
    return ((words.unsqueeze(-1) >> bits) & 1).flatten(-2) << 4


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and smallest values of eight groups, from numbers of six bits in twelve bytes: [outputs, groups]."""
    packed = blocks[..., 4:16].to(torch.int32)
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), -1).float()
    offsets = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), -1).float()
    scales = scales * _halves(blocks, 0).float()[..., None]
    offsets = offsets * _halves(blocks, 2).float()[..., None]
    return scales.flatten(1), -offsets.flatten(1)


def _with_smallest(
    layout: str, numbers: torch.Tensor, scales: torch.Tensor, smallest: torch.Tensor, group_size: int
) -> StoredWeight:
    """number * scale + smallest, as (number - zero) * scale.

    Where the scale is 0, all numbers of the group mean the smallest: they become 0, and the zero point -1.
    """
    numbers, is_flat = numbers.flatten(1), scales == 0
    zeros = -smallest / scales
    if is_flat.any():  # rare
        zeros = zeros.masked_fill(is_flat, -1.0)
        scales = torch.where(is_flat, smallest, scales)
        numbers = numbers.masked_fill(is_flat.repeat_interleave(group_size, 1), 0)
    return StoredWeight(layout, numbers, scales, group_size, zeros)
