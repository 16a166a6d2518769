"""Times of short device work: replays of a captured graph, medians of many, over buffers the cache cannot hold."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from report.bench import Bench

NUM_SAMPLES = 30
MIN_REPLAY_S = 1e-3
"""A replay is so long at least: what it costs to start one then hardly shows."""
COLD_BYTES = 256 << 20
"""More than four times the second-level cache of an H200: a buffer is gone from it before its turn comes again."""
MAX_COPIES = 256

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call.

    Attributes:
        spread: How far the medians of two measurements lie apart, as a share; None where one was made.
    """

    median_s: float
    spread: float | None = None


def num_copies(bench: Bench, num_bytes: float) -> int:
    """How many sets of buffers of this size to go round."""
    return bench.pick(min(MAX_COPIES, max(1, math.ceil(COLD_BYTES / max(num_bytes, 1)))), 1)


def time_calls(bench: Bench, calls: Sequence[Call], *, is_headline: bool = False, is_captured: bool = True) -> Timing:
    """Median time of a call; `calls` do the same to different buffers, one after the other.

    `is_captured` is False for what cannot be recorded; then the host's pace may be what is measured. A headline is
    measured twice.
    """
    for call in calls[: bench.pick(3, 1)]:
        call()  # compiles
    medians = [_median_s(bench, calls, is_captured) for _ in range(2 if is_headline else 1)]
    spread = abs(medians[0] - medians[-1]) / min(medians) if is_headline else None
    return Timing(min(medians), spread)


def _median_s(bench: Bench, calls: Sequence[Call], is_captured: bool) -> float:
    if bench.device.type == "cpu":
        return _wall_s(calls) / len(calls)
    rotation_s = _event_s(lambda: _run_all(calls), 2)
    num_rounds = max(1, min(64, math.ceil(MIN_REPLAY_S / rotation_s)))
    if not is_captured:
        return _event_s(lambda: _run_all(calls, num_rounds), NUM_SAMPLES) / num_rounds / len(calls)
    with recorded(lambda: _run_all(calls, num_rounds)) as graph:
        return _event_s(graph.replay, NUM_SAMPLES) / num_rounds / len(calls)


@contextmanager
def recorded(work: Call) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of `work`, whose memory goes back afterwards."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # whatever is made once is made outside of the graph
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    try:
        yield graph
    finally:
        torch.cuda.synchronize()
        graph.reset()


def _run_all(calls: Sequence[Call], num_rounds: int = 1) -> None:
    for _ in range(num_rounds):
        for call in calls:
            call()


def _event_s(work: Call, num_samples: int) -> float:
    """Median of device times between events around `work`; all are in the queue before one is read."""
    pairs = [(_event(), _event()) for _ in range(num_samples)]
    torch.cuda.synchronize()
    for start, end in pairs:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _wall_s(calls: Sequence[Call]) -> float:
    start_s = time.perf_counter()
    _run_all(calls)
    return time.perf_counter() - start_s
