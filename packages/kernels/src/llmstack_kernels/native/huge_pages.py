"""Memory for weights in huge pages, since every step reads all of it."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref

import torch

_HUGE_PAGE_BYTES = 1 << 21
_SMALLEST_BYTES = _HUGE_PAGE_BYTES // 2
_REGION_BYTES = 64 << 20
_ALIGNMENT = 4096


def empty_in_huge_pages(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor [num_elements]; in ordinary pages if it is small or the system has no huge ones.

    Tensors lie one after another in regions of 64 MiB, so that no page is partly used. A region is freed with the last
    of its tensors: use it for what is freed together, as weights are.
    """
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < _SMALLEST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_elements, dtype=dtype)
    return _REGIONS.take(num_bytes).view(dtype)


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


class _Regions:
    """Hands out memory of a region, from its start on; the next region follows when it is used up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: weakref.ref[mmap.mmap] | None = None  # its tensors keep it
        self._begin = self._end = 0  # bytes of it that are free

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], aligned to small pages."""
        with self._lock:
            region = None if self._region is None else self._region()
            if region is None or self._begin + num_bytes > self._end:
                region = self._add_region(num_bytes)
            start = self._begin
            self._begin += num_bytes + -num_bytes % _ALIGNMENT
            return torch.frombuffer(region, dtype=torch.uint8, offset=start, count=num_bytes)

    def _add_region(self, num_bytes: int) -> mmap.mmap:
        """A region of which at least `num_bytes` are free."""
        num_pages = -(-max(num_bytes, _REGION_BYTES) // _HUGE_PAGE_BYTES)
        # One page more, for alignment; pages that are never touched take no memory.
        size = (num_pages + 1) * _HUGE_PAGE_BYTES
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        region.madvise(mmap.MADV_HUGEPAGE)
        start = -torch.frombuffer(region, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES
        self._region, self._begin, self._end = weakref.ref(region), start, start + num_pages * _HUGE_PAGE_BYTES
        return region


_REGIONS = _Regions()
