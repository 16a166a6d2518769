"""What an error says: that there was no memory, that all is over, or that something in the step was too much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llmstack_model_runner.input_batch import InputBatchError
from llmstack_types import EngineStartError

# Of PyTorch's allocators on either device, CUDA's and Triton's own, cuBLAS's workspaces, C++.
_ALLOCATION_TEXTS = ("out of memory", "can't allocate memory", "alloc_failed", "bad_alloc", "bad allocation")
# Older versions of PyTorch raise a plain RuntimeError where the device has failed.
_FATAL_ERRORS = (InputBatchError, getattr(torch, "AcceleratorError", InputBatchError))
_DEVICE_TEXTS = ("CUDA error", "[CUDA]", "CUBLAS_STATUS", "cuDNN error")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, which leaves everything as it was."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _ALLOCATION_TEXTS)


def is_fatal(error: BaseException) -> bool:
    """Whether no further step can be right: the device has failed, or the scheduler and the runner disagree.

    After an illegal memory access, say, every call of CUDA fails until the process has ended.
    """
    if is_out_of_memory(error):
        return False
    if isinstance(error, _FATAL_ERRORS):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _DEVICE_TEXTS)


@contextmanager
def allocation(purpose: str, remedy: str) -> Iterator[None]:
    """Makes a failed allocation within it an error of the start.

    Raises:
        EngineStartError: There was no memory for `purpose`; the sentence ends with `remedy`.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise EngineStartError(f"out of memory: {purpose}; {remedy}") from error
