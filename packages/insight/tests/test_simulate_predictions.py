"""Predicted first tokens beside the real scheduler on a trace."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from llmstack_core_scheduler import SchedulerConfig
from llmstack_insight.simulate import SimulationConfig, SimulationError, TraceRequest, simulate


def trace(num_requests: int) -> list[TraceRequest]:
    return [TraceRequest(0.7 * i, 200 + i * 331 % 1800, 5 + i * 17 % 60) for i in range(num_requests)]


def test_a_simulation_compares_what_was_predicted_with_what_came():
    report = simulate(trace(300), SimulationConfig(load=0.8, predicts=True))
    predictions = report.predictions
    assert predictions is not None
    assert len(predictions.real_s) + predictions.num_unpredicted == report.num_requests == 300
    assert predictions.num_unpredicted < 30
    assert predictions.share_met >= 0.9
    named = report.to_json()["predictions"]
    assert named["share_met"] == predictions.share_met
    assert f"{100 * named['share_met']:.1f} % of {named['predicted']} first tokens" in report.to_text()


def test_a_simulation_knows_places_by_the_requests_that_have_them():
    """Bursts of 40 requests on four places, whose answers end by chance."""
    burst = [TraceRequest(60.0 * (i // 40), 100, 1 + int(-100 * math.log(1 - (i * 0.618) % 1))) for i in range(600)]
    config = SimulationConfig(scheduler=SchedulerConfig(max_num_seqs=4), load=0.8, predicts=True)
    predictions = simulate(burst, config).predictions
    assert predictions is not None
    assert predictions.share_met >= 0.8


def test_requests_that_a_simulation_refuses_are_no_part_of_its_queue():
    """Between bursts come requests that are larger than the pool."""
    burst = [TraceRequest(60.0 * (i // 40), 100, 1 + int(-100 * math.log(1 - (i * 0.618) % 1))) for i in range(400)]
    refused = [TraceRequest(60.0 * (i // 40) + 30.0, 5000, 50) for i in range(400)]
    config = SimulationConfig(scheduler=SchedulerConfig(max_num_seqs=4), num_blocks=200, predicts=True)
    report = simulate(sorted(burst + refused, key=lambda one: one.arrival_s), config)
    assert report.predictions is not None
    assert (report.num_refused, report.num_requests) == (400, 400)
    assert report.predictions.share_met >= 0.8


def test_a_load_scales_the_arrivals_to_a_share_of_the_capacity():
    at_once = simulate([replace(one, arrival_s=0.0) for one in trace(200)], SimulationConfig())
    report = simulate(trace(200), SimulationConfig(load=0.5))
    assert report.simulated_s == pytest.approx(2 * at_once.simulated_s, rel=0.1)


def test_predictions_of_several_replicas_are_refused():
    with pytest.raises(SimulationError, match="one replica"):
        simulate(trace(20), SimulationConfig(num_replicas=2, predicts=True))
