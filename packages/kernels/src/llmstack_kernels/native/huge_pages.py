"""Memory for weights in huge pages, since every step reads all of it."""

from __future__ import annotations

import mmap

import torch

_HUGE_PAGE_BYTES = 1 << 21
_SMALLEST_BYTES = _HUGE_PAGE_BYTES // 2  # a smaller tensor would leave most of a page unused


def empty_in_huge_pages(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor [num_elements]; in ordinary pages if it is small or the system has no huge ones."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < _SMALLEST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_elements, dtype=dtype)
    num_pages = -(-num_bytes // _HUGE_PAGE_BYTES)
    # One page more, for alignment; pages that are never touched take no memory.
    buffer = mmap.mmap(-1, (num_pages + 1) * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(buffer, dtype=torch.uint8)
    start = -memory.data_ptr() % _HUGE_PAGE_BYTES
    return memory[start : start + num_bytes].view(dtype)
