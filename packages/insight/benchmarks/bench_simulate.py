"""How fast a trace is simulated: steps per second of the real scheduler and cache under a cost model."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_insight.simulate import Arrivals, SimulationConfig, TraceRequest, simulate

PIECE = 512


def shared_prefix_trace(num_requests: int) -> list[TraceRequest]:
    """Prompts of 8 pieces, of which the first 4 are those of one request in ten."""
    trace = []
    for index in range(num_requests):
        first, own = 10 * (index % 10), 1000 * (index + 1)
        trace.append(TraceRequest(0.05 * index, 8 * PIECE, 100, (*range(first, first + 4), *range(own, own + 4))))
    return trace


@pytest.mark.parametrize("arrivals", list(Arrivals))
def test_simulate(benchmark: BenchmarkFixture, arrivals: Arrivals) -> None:
    trace = shared_prefix_trace(200)
    report = benchmark.pedantic(lambda: simulate(trace, SimulationConfig(arrivals=arrivals)), rounds=3)
    benchmark.extra_info["steps_per_s"] = round(report.num_steps / report.wall_s)
    benchmark.extra_info["simulated_s_per_s"] = round(report.simulated_s / report.wall_s)
