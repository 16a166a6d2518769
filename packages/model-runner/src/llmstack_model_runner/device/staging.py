"""Staging memory: one asynchronous copy for all small arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.device.runtime import DeviceRuntime, Transfer

_NUM_SLOTS = 8
"""Copies in flight: up to four per step, with the host one step ahead, so the host never waits for a slot."""
_ALIGNMENT = 16
"""Alignment in bytes; kernels load pieces of this size."""
_FIRST_NUM_BYTES = 1 << 16


class Staging:
    """Ring of host memory that the device reads asynchronously; a slot is reused once its copy is complete."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._slots = [runtime.staging(_FIRST_NUM_BYTES) for _ in range(_NUM_SLOTS)]
        self._transfers: list[Transfer | None] = [None] * _NUM_SLOTS
        self._next = 0

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """The arrays as device tensors, valid for all work that is started after this call."""
        ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays])
        slot = self._slot(int(ends[-1]))
        starts = [0, *ends[:-1].tolist()]
        for start, array in zip(starts, arrays, strict=True):
            slot[start : start + array.nbytes].view(_dtype(array)).view(array.shape).numpy()[...] = array
        sent, self._transfers[self._next] = self._runtime.send(slot[: int(ends[-1])])
        self._next = (self._next + 1) % _NUM_SLOTS
        return [
            sent[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _slot(self, num_bytes: int) -> torch.Tensor:
        transfer = self._transfers[self._next]
        if transfer is not None:
            transfer.wait()
        if len(self._slots[self._next]) < num_bytes:  # the largest step so far: twice its size leaves room to grow
            self._slots[self._next] = self._runtime.staging(2 * num_bytes)
        return self._slots[self._next]


def _dtype(array: npt.NDArray[Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return dtype
