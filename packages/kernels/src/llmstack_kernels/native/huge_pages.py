"""Memory for weights, in large pages where the system has them: each step reads all of it."""

from __future__ import annotations

import mmap

import torch

_HUGE_PAGE_BYTES = 1 << 21
_SMALLEST_BYTES = _HUGE_PAGE_BYTES // 2  # less would mostly be left unused


def empty_in_huge_pages(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor [num_elements] without values; a plain one where it is small or the system knows no large pages."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < _SMALLEST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_elements, dtype=dtype)
    num_pages = -(-num_bytes // _HUGE_PAGE_BYTES)
    # One page more, to begin at a page's start; what is never touched takes no memory.
    buffer = mmap.mmap(-1, (num_pages + 1) * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(buffer, dtype=torch.uint8)
    start = -memory.data_ptr() % _HUGE_PAGE_BYTES
    return memory[start : start + num_bytes].view(dtype)
