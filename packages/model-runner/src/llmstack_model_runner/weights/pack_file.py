"""Files of packed weights.

They have a header in JSON, which bounds all else, and tensors at multiples of 64 bytes. They hold no code.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch

from llmstack_kernels.linear import PackedWeight

MAGIC = b"LLMSPK02"
"""Changes with the format."""
PREFIX_BYTES = 32
"""Magic, length and digest of the header."""
MAX_HEADER_BYTES = 1 << 24
ALIGNMENT = 64
PIECE_BYTES = 1 << 24
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int32,
)}  # fmt: skip
KeptWeights: TypeAlias = "Mapping[str, tuple[PackedWeight, ...]]"
"""Layers by their names, each of one part or several."""


def read_header(file: BinaryIO, num_bytes: int) -> Mapping[str, Any]:
    """The layers of a file of so many bytes, each a list of parts whose tensors lie in it.

    Raises:
        ValueError, KeyError, TypeError: The file is damaged.
    """
    start = file.read(PREFIX_BYTES)
    header_bytes = int.from_bytes(start[8:16], "little")
    if start[:8] != MAGIC or len(start) != PREFIX_BYTES or header_bytes > MAX_HEADER_BYTES:
        raise ValueError("the format is another one")
    text = file.read(header_bytes)
    if _digest(text) != start[16:]:
        raise ValueError("the header is damaged")
    header = json.loads(text)
    entries: Mapping[str, Any] = header["entries"]
    for parts in entries.values():
        for part in parts:
            check_part(part, num_bytes)
    if header["num_bytes"] != num_bytes:
        raise ValueError("the file is not complete")
    return entries


def check_part(part: Mapping[str, Any], file_bytes: int) -> None:
    """Raises ValueError, KeyError or TypeError for a layer's part whose tensors do not lie in the file."""
    if len(part["shape"]) != 2 or part["dtype"] not in DTYPES or not isinstance(part["group_size"], int):
        raise ValueError("a layer is described wrongly")
    if not isinstance(part["has_order"], bool):
        raise ValueError("a layer is described wrongly")
    for described in part["tensors"]:
        num_bytes = num_elements(described["shape"]) * DTYPES[described["dtype"]].itemsize
        if not 0 <= described["offset"] <= file_bytes - num_bytes:
            raise ValueError("a tensor does not lie in the file")


def num_elements(shape: Any) -> int:
    """Numbers of a tensor; ValueError for a negative size."""
    count = 1
    for size in shape:
        if not isinstance(size, int) or size < 0:
            raise ValueError("a size is no natural number")
        count *= size
    return count


def write_file(path: Path, kept: KeptWeights) -> None:
    """Writes a file beside the others and renames it, once it is on the disk.

    Raises:
        BlockingIOError: Another process writes it, or has written it.
        ValueError: A tensor has a type that no file has.
    """
    entries: dict[str, list[dict[str, Any]]] = {name: [] for name in kept}
    offset = 0
    for name, weight in _parts(kept):
        tensors = []
        for tensor in _tensors_of(weight):
            if tensor.dtype not in DTYPES.values():
                raise ValueError(f"{name} has a tensor of {tensor.dtype}")
            described = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            tensors.append({**described, "offset": offset})
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        part = {
            "shape": list(weight.shape), "dtype": str(weight.dtype).removeprefix("torch."), "scheme": weight.scheme,
            "group_size": weight.group_size, "has_order": weight.order is not None, "tensors": tensors,
        }  # fmt: skip
        entries[name].append(part)
    header = _header(entries, offset)
    made = path.with_name(f".{path.name}")
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not made.exists() or not os.path.samestat(os.fstat(descriptor), os.stat(made)):
            raise BlockingIOError("another process was first")
        file.truncate(0)
        file.write(MAGIC + len(header).to_bytes(8, "little") + _digest(header) + header)
        for piece in _pieces(kept):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())  # after a loss of power the name must not be there without the content
        os.rename(made, path)


def _header(entries: Mapping[str, list[dict[str, Any]]], num_data_bytes: int) -> bytes:
    """The header with offsets from the start of the file, padded to the alignment."""
    tensors = [described for parts in entries.values() for part in parts for described in part["tensors"]]
    room = len(json.dumps(entries)) + 64 * len(tensors) + 1024
    start = -(-(PREFIX_BYTES + room) // ALIGNMENT) * ALIGNMENT
    for described in tensors:
        described["offset"] += start
    text = json.dumps({"num_bytes": start + num_data_bytes, "entries": entries}).encode()
    if start > MAX_HEADER_BYTES:
        raise ValueError("the model has too many layers")
    return text.ljust(start - PREFIX_BYTES)


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _parts(kept: KeptWeights) -> Iterator[tuple[str, PackedWeight]]:
    return ((name, weight) for name, weights in kept.items() for weight in weights)


def _tensors_of(weight: PackedWeight) -> tuple[torch.Tensor, ...]:
    return weight.tensors if weight.order is None else (*weight.tensors, weight.order)


def tensors_of(kept: KeptWeights) -> Iterator[torch.Tensor]:
    """All tensors in the order of the file."""
    return (tensor for _, weight in _parts(kept) for tensor in _tensors_of(weight))


def _pieces(kept: KeptWeights) -> Iterator[memoryview | bytes]:
    for tensor in tensors_of(kept):
        memory = tensor.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(memory), PIECE_BYTES):
            yield memory[start : start + PIECE_BYTES]
        yield bytes(-len(memory) % ALIGNMENT)
