"""Cost models: fitted, read and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_client.prediction.cost_model import step_work
from llmstack_engine_core import SchedulerConfig
from llmstack_insight.simulate import (
    LinearCostModel,
    SimulationError,
    StepWork,
    fit_cost_model,
    load_cost_model,
    measured_steps,
)
from llmstack_insight.simulate.report import percentiles
from llmstack_step_log import LoggedScheduler, LogHeader, RecordedRun, RingSink, StepLog
from llmstack_step_log.control_plane import CacheConfig, build_scheduler
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams, ScheduledRequest


@given(
    st.lists(
        st.builds(StepWork, st.integers(0, 4000), st.integers(0, 200), st.integers(0, 10**6)), min_size=8, max_size=40
    )
)
def test_a_linear_model_is_found_again_in_what_it_says(works: list[StepWork]) -> None:
    model = LinearCostModel()
    fitted = fit_cost_model((work, model.step_s(work)) for work in works)
    for work in works:
        assert fitted.step_s(work) == pytest.approx(model.step_s(work), rel=1e-3)


def test_the_rows_of_a_step_are_prompts_decodes_and_drafts() -> None:
    prompt, decode = ScheduledRequest("p", 16, 40, [1]), ScheduledRequest("d", 90, 1, [])
    verifying = ScheduledRequest("v", 30, 4, [], [7, 8, 9])
    assert step_work([prompt, decode, verifying]) == StepWork(40, 1 + 4, 56 + 91 + 34)
    as_in_a_log = [("d", 90, 1, None, None), ("v", 30, 4, None, [7, 8, 9])]
    assert step_work(as_in_a_log) == StepWork(0, 5, 91 + 34)


def test_a_fit_has_no_negative_weight() -> None:
    measured = [(StepWork(10, 0, 10), 0.010), (StepWork(20, 0, 20), 0.012), (StepWork(0, 5, 4000), 0.005)]
    fitted = fit_cost_model(measured)
    assert min(fitted.base_s, fitted.prefill_token_s, fitted.decode_row_s, fitted.context_token_s) >= 0
    for work, seconds in measured:
        assert fitted.step_s(work) == pytest.approx(seconds, rel=0.3)


def test_a_cost_model_comes_from_its_weights_or_from_measured_steps(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"base_s": 0.5}')
    assert load_cost_model(path) == LinearCostModel(base_s=0.5)
    path.write_text('{"steps": [[0, 0, 0, 0.5], [100, 0, 0, 1.5]]}')
    assert load_cost_model(path).step_s(StepWork(50, 0, 0)) == pytest.approx(1.0)


def test_a_recorded_run_tells_how_long_its_steps_took(tmp_path: Path) -> None:
    cache, limits, sink = CacheConfig(50), SchedulerConfig(), RingSink(1 << 20)
    log = StepLog(LogHeader.of(limits, cache, {}), sink)
    scheduler = LoggedScheduler(build_scheduler(limits, cache), log)
    model, now_s = LinearCostModel(base_s=0.5, prefill_token_s=0.25, decode_row_s=2.0, context_token_s=0.125), 3.0
    for index in range(8):
        prompt = list(range(index, index + 20 + 5 * index))
        scheduler.add_request(EngineCoreRequest(str(index), prompt, SamplingParams(max_tokens=4 + index, seed=0)))
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(now_s)
        rows = scheduled.scheduled_requests
        now_s += model.step_s(step_work(rows)) if rows else 0.0
        scheduler.update_from_output(scheduled, ModelRunnerOutput([row[0] for row in rows], [[1] for _ in rows]), now_s)
    log.close()
    steps = list(measured_steps(RecordedRun(sink.dump())))
    assert len(steps) == 11
    assert steps[0][0] == StepWork(num_prefill_tokens=300, num_decode_rows=0, num_context_tokens=300)
    assert all(seconds == pytest.approx(model.step_s(work), abs=2e-6) for work, seconds in steps)
    path = tmp_path / "run.steps"
    path.write_bytes(sink.dump())
    fitted = load_cost_model(path)
    assert all(fitted.step_s(work) == pytest.approx(seconds, rel=1e-3) for work, seconds in steps)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no JSON"),
        ("[]", "JSON object"),
        ("llmsteps", "header"),
        ('{"speed": 1}', "no 'speed'"),
        ('{"base_s": -1}', "base_s"),
        ('{"base_s": "1"}', "base_s"),
        ('{"base_s": 0, "prefill_token_s": 0, "decode_row_s": 0, "context_token_s": 0}', "some time"),
        ('{"steps": 1}', "must be a list"),
        ('{"steps": []}', "no measured steps"),
        ('{"steps": [[1, 2, 3]]}', "a step must be"),
        ('{"steps": [[1, 2, 3, 0]]}', "more than 0 seconds"),
    ],
)
def test_a_cost_model_that_makes_no_sense_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(SimulationError, match=expected):
        load_cost_model(path)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles(range(1, 101)) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}
