"""Several simulated engine cores beside other ways to use as many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmstack_engine_client.prediction.cost_model import CostModel
from llmstack_engine_client.routing import RoutingPolicy
from llmstack_insight.simulate.prompts import num_unbounded_blocks
from llmstack_insight.simulate.report import Comparison, Report, percentiles
from llmstack_insight.simulate.simulation import SimulationConfig, hits_of_one_cache, simulate
from llmstack_insight.simulate.traces import TraceRequest


def simulate_replicas(trace: Sequence[TraceRequest], config: SimulationConfig, cost_model: CostModel) -> Report:
    """Runs the trace, and for several replicas also with round robin and through one cache as large as all together.

    Raises:
        SimulationError: A setting is not valid, or the scheduler makes no progress.
    """
    report = simulate(trace, config, cost_model)
    if config.num_replicas == 1:
        return report
    if config.num_blocks is None:
        num_blocks = num_unbounded_blocks(trace, config.block_size, num_concurrent=1)
    else:
        num_blocks = config.num_blocks * config.num_replicas
    turns = report
    if config.routing is not RoutingPolicy.ROUND_ROBIN:
        turns = simulate(trace, replace(config, routing=RoutingPolicy.ROUND_ROBIN), cost_model)
    report.compared = Comparison(
        hits_of_one_cache(trace, num_blocks, config.block_size),
        percentiles(turns.ttft_s)["p99"],
        turns.num_hit_tokens,
    )
    return report
