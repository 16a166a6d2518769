"""Arrival times of requests: all at once, at a rate, or from a trace."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate

from llmstack_bench.errors import BenchError
from llmstack_bench.workload import BenchRequest


def arrival_times(
    num_requests: int, request_rate: float = math.inf, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Seconds since the start at which to send each request; the first is 0.

    Gaps follow a gamma distribution and are scaled so that the mean rate is exactly `request_rate`.

    `request_rate`: Requests per second; infinite sends all at once.
    `burstiness`: Shape of the distribution: 1 is a Poisson process, below 1 sends bursts, infinity is evenly spaced.

    Raises:
        BenchError: A rate or a burstiness that is not above 0.
    """
    if not request_rate > 0:
        raise BenchError(f"--request-rate {request_rate}: must be above 0", exit_code=2)
    if not burstiness > 0:
        raise BenchError(f"--burstiness {burstiness}: must be above 0", exit_code=2)
    if math.isinf(request_rate) or num_requests < 2:
        return [0.0] * num_requests
    times = list(accumulate(_gaps(num_requests - 1, burstiness, seed), initial=0.0))
    scale = (num_requests - 1) / request_rate / times[-1] if times[-1] else 0.0
    return [time_s * scale for time_s in times]


def ramped_arrival_times(
    num_requests: int, strategy: str, start_rate: float, end_rate: float, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Seconds since the start at which to send each request, at a rate that rises from one to the other.

    `strategy`: `linear` or `exponential`, over the requests.
    """
    gaps = _gaps(max(0, num_requests - 1), burstiness, seed)

    def rate(index: int) -> float:
        share = index / max(1, num_requests - 1)
        if strategy == "linear":
            return start_rate + (end_rate - start_rate) * share
        return float(start_rate * (end_rate / start_rate) ** share)

    return list(accumulate((gap / rate(index) for index, gap in enumerate(gaps)), initial=0.0))[:num_requests]


def planned_arrivals(requests: Sequence[BenchRequest]) -> list[float] | None:
    """The arrival times that the requests carry; None if any request has none."""
    times = [request.arrival_s for request in requests if request.arrival_s is not None]
    return times if times and len(times) == len(requests) else None


def _gaps(num_gaps: int, burstiness: float, seed: int) -> list[float]:
    if math.isinf(burstiness):
        return [1.0] * num_gaps
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    return [rng.gammavariate(burstiness, 1 / burstiness) for _ in range(num_gaps)]
