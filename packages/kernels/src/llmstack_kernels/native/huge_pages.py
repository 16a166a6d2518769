"""Memory for weights in huge pages, since every step reads all of it."""

from __future__ import annotations

import ctypes
import mmap

import torch

from llmstack_kernels.memory_regions import REGION_BYTES, REGIONS

_HUGE_PAGE_BYTES = 1 << 21
_SMALLEST_BYTES = _HUGE_PAGE_BYTES // 2


def empty_in_huge_pages(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor [num_elements]; in ordinary pages if it is small or the system has no huge ones.

    Tensors lie one after another in regions of 64 MiB, so that no page is partly used. A region is freed with the last
    of its tensors: use it for what is freed together, as weights are.
    """
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < _SMALLEST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_elements, dtype=dtype)
    region, start = REGIONS.take(num_bytes)
    return torch.frombuffer(region, dtype=torch.uint8, offset=start, count=num_bytes).view(dtype)


def empty_in_own_pages(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor that shares its memory with no other, in huge pages as far as it has whole ones.

    A large one may take memory that was touched before (`memory_regions`).
    """
    if shape.numel() * dtype.itemsize > REGION_BYTES:
        return empty_in_huge_pages(shape.numel(), dtype).view(shape)
    tensor = torch.empty(shape, dtype=dtype)
    advise_huge_pages(tensor)
    return tensor


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Asks the system for huge pages behind a tensor's memory, which nothing has touched yet; it is freed as ever.

    Large tensors have a mapping of their own, whose first touch takes a third of the time so. The ends of a tensor
    that are no whole page stay as they are, and so does everything where the system has no huge pages.
    """
    start, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    skipped = -start % _HUGE_PAGE_BYTES
    num_bytes = (num_bytes - skipped) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if num_bytes > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(start + skipped), ctypes.c_size_t(num_bytes), mmap.MADV_HUGEPAGE)
