"""How long the device worked during some steps, and how long it waited, from the profiler's record of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType

LAUNCH_GAP_US = 5.0
"""Shorter pauses lie between two kernels of one graph; in longer ones the device waits for the host."""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Microseconds from the first kernel's start to the last one's end."""

    busy_us: float
    gaps_us: float
    idle_us: float

    @property
    def span_us(self) -> float:
        """All of it."""
        return self.busy_us + self.gaps_us + self.idle_us

    @property
    def idle_share(self) -> float:
        """Of the span."""
        return self.idle_us / self.span_us if self.span_us else 0.0


def account(intervals: Iterable[tuple[float, float]]) -> DeviceTime:
    """Divides the time between the first start and the last end of (start, end) in microseconds; they may overlap."""
    busy_us = gaps_us = idle_us = 0.0
    reached: float | None = None
    for start, end in sorted(intervals):
        if reached is None:
            reached = start
        pause = max(0.0, start - reached)
        gaps_us, idle_us = (gaps_us + pause, idle_us) if pause <= LAUNCH_GAP_US else (gaps_us, idle_us + pause)
        busy_us += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return DeviceTime(busy_us, gaps_us, idle_us)


def profiled(work: Callable[[], object], device_type: str) -> DeviceTime:
    """`work` under the profiler, which slows the host: take the wall time from a run without it."""
    is_gpu = device_type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if is_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
        work()
    wanted = DeviceType.CUDA if is_gpu else DeviceType.CPU
    events = [event for event in profiler.events() if event.device_type == wanted]
    return account((event.time_range.start, event.time_range.end) for event in events)
