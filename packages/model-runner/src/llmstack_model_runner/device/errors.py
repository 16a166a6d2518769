"""Errors of a device: failed allocations, and failures after which nothing works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llmstack_types import EngineStartError

# From PyTorch's allocators for CPU and GPU, CUDA, Triton, cuBLAS and C++.
_ALLOCATION_TEXTS = ("out of memory", "can't allocate memory", "alloc_failed", "bad_alloc", "bad allocation")
# Older versions of PyTorch raise a plain RuntimeError where the device has failed.
_AcceleratorError: type[BaseException] | None = getattr(torch, "AcceleratorError", None)
_DEVICE_TEXTS = ("CUDA error", "[CUDA]", "CUBLAS_STATUS", "cuDNN error")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. Such a failure changes no state."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _ALLOCATION_TEXTS)


def is_device_failure(error: BaseException) -> bool:
    """Whether the device has failed, so that no further step can be correct.

    After an illegal memory access, for example, every CUDA call fails until the process ends.
    """
    if is_out_of_memory(error):
        return False
    if _AcceleratorError is not None and isinstance(error, _AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _DEVICE_TEXTS)


@contextmanager
def allocation(purpose: str, remedy: str) -> Iterator[None]:
    """Turns a failed allocation inside the block into a start error.

    Raises:
        EngineStartError: An allocation failed; the message names `purpose` and ends with `remedy`.
    """
    try:
        yield
    except Exception as error:  # allocations fail with errors of many types; others are raised again
        if not is_out_of_memory(error):
            raise
        raise EngineStartError(f"out of memory: {purpose}; {remedy}") from error
