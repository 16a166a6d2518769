"""Traces through several simulated engine cores: what routing gains, and what is reported about it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from llmstack_engine_client.routing import RoutingPolicy
from llmstack_engine_core import SchedulerConfig
from llmstack_insight.simulate import (
    Arrivals,
    LinearCostModel,
    SimulationConfig,
    SimulationError,
    TraceFormat,
    TraceRequest,
    read_trace,
    simulate,
    simulate_replicas,
)
from llmstack_insight.simulate.simulation import _Simulation, hits_of_one_cache

MOONCAKE = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces" / "mooncake_conversation.jsonl"


def conversations(num_conversations: int = 12, num_turns: int = 4, seed: int = 0) -> list[TraceRequest]:
    """Each turn repeats the one before and adds a piece; the conversations overlap in time."""
    rng, trace = random.Random(seed), []
    for conversation in range(num_conversations):
        start_s = rng.uniform(0, 5)
        for turn in range(1, num_turns + 1):
            ids = tuple(1000 * conversation + piece for piece in range(turn))
            trace.append(TraceRequest(start_s + 2.0 * turn, 512 * turn - 10, 8, (0, *ids)[:turn]))
    return sorted(trace, key=lambda request: request.arrival_s)


@pytest.mark.parametrize("routing", RoutingPolicy)
@pytest.mark.parametrize("arrivals", Arrivals)
def test_every_request_ends_with_all_its_tokens_on_any_replica(routing: RoutingPolicy, arrivals: Arrivals) -> None:
    trace = conversations()
    config = SimulationConfig(num_blocks=400, num_replicas=3, routing=routing, arrivals=arrivals)
    report = simulate(trace, config)
    assert (report.num_requests, report.num_refused) == (len(trace), 0)
    assert report.num_output_tokens == sum(request.num_output_tokens for request in trace)
    assert sum(report.num_computed_tokens) + report.num_hit_tokens == report.num_prompt_tokens
    assert report.imbalance >= 1.0


def test_what_the_router_knows_is_what_the_replicas_have_after_every_step() -> None:
    trace = conversations(num_conversations=10, seed=3)
    config = SimulationConfig(num_blocks=120, num_replicas=3, scheduler=SchedulerConfig(max_num_batched_tokens=300))
    simulation = _Simulation(trace, config, LinearCostModel())
    router = simulation._router
    assert router is not None
    tell, num_compared = simulation._tell, 0

    def tell_and_compare(the_router: object, index: int) -> None:
        nonlocal num_compared
        tell(router, index)
        segments = simulation._replicas[index]._segments
        assert segments is not None
        known = {key for key, replicas in router.index._key_to_replicas.items() if replicas >> index & 1}
        assert known == set(segments.keys)
        num_compared += bool(segments.keys)

    simulation._tell = tell_and_compare
    report = simulation.run()
    assert num_compared > 50
    assert report.num_evictions > 0
    assert router.index.num_gaps == 0


def test_exact_routing_finds_what_one_cache_finds_and_round_robin_does_not() -> None:
    config = SimulationConfig(num_blocks=2000, num_replicas=4)
    report = simulate_replicas(conversations(21, 5), config, LinearCostModel())
    compared = report.compared
    assert compared is not None
    assert report.share_of_one_cache is not None
    assert compared.num_one_cache_hit_tokens == hits_of_one_cache(conversations(21, 5), 8000, 16) > 0
    assert report.share_of_one_cache > 0.9 > compared.round_robin_hit_tokens / compared.num_one_cache_hit_tokens
    replicas = report.to_json()["replicas"]
    assert (replicas["count"], replicas["routing"]) == (4, "exact")
    assert "4 by exact" in report.to_text()


def test_one_cache_finds_what_one_engine_core_finds_without_load() -> None:
    trace = conversations(6)
    alone = simulate(trace, SimulationConfig(num_blocks=200, arrivals=Arrivals.SEQUENTIAL))
    assert hits_of_one_cache(trace, 200, 16) == alone.num_hit_tokens


def test_replicas_without_a_cache_are_balanced_by_their_requests() -> None:
    config = SimulationConfig(num_replicas=2, enable_prefix_caching=False, num_blocks=500)
    report = simulate(conversations(), config)
    assert report.num_hit_tokens == 0
    assert report.imbalance < 1.35


def test_no_replicas_are_refused() -> None:
    with pytest.raises(SimulationError, match="num_replicas"):
        simulate(conversations(1), SimulationConfig(num_replicas=0))


@pytest.mark.full
def test_mooncake_at_eight_replicas_keeps_the_hits_of_one_cache_and_the_times_of_round_robin() -> None:
    if not MOONCAKE.is_file():
        pytest.skip("needs ../shared/data/traces/mooncake_conversation.jsonl, which is not beside this checkout")
    trace = read_trace(MOONCAKE, TraceFormat.MOONCAKE, 1500)
    config = SimulationConfig(num_blocks=1_000_000 // 128, block_size=128, num_replicas=8)
    report = simulate_replicas(trace, config, LinearCostModel())
    assert report.share_of_one_cache is not None
    assert report.compared is not None
    assert report.share_of_one_cache >= 0.92
    assert report.imbalance <= 1.35
    p99_s, round_robin_s = report.to_json()["ttft_s"]["p99"], report.compared.round_robin_p99_ttft_s
    assert round_robin_s is not None
    assert p99_s <= round_robin_s
