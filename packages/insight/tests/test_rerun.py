"""Recorded requests run again on a virtual clock: unchanged they get what they got, changed what others decide."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from llmstack_core_scheduler import KVCacheManager, Scheduler, SchedulerConfig
from llmstack_engine_client.prediction.cost_model import LinearCostModel, StepWork
from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_engine_core import EngineConfig, EngineCore, SpeculativeConfig, build_engine_core
from llmstack_insight.rerun import (
    Outcome,
    PlaneError,
    RecordedRequest,
    RecordedRequests,
    changed_plane,
    fit_to_steps,
    recorded_plane,
    requests_of_log,
    rerun,
)
from llmstack_step_log import RecordedRun, RingSink
from llmstack_step_log.control_plane import CacheConfig, build_scheduler
from llmstack_types import EngineCoreOutputs, EngineCoreRequest, ModelRunnerConfig, SamplingParams, SchedulerOutput

LIMITS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 16}
STEP_S = 0.01
LOADS = [(number, 1 + number // 2 % 8) for number in range(400)]


class Clock:
    """A clock that only steps move: the runner stands for a device of a constant speed."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def build(num_blocks: int = 64, model: dict[str, Any] | None = None, **changes: Any) -> tuple[EngineCore, Clock]:
    limits = LIMITS | {name: value for name, value in changes.items() if name in LIMITS}
    config = EngineConfig(
        ModelRunnerConfig("echo?vocab_size=100", block_size=4, **limits, **(model or {})),
        runner="echo",
        scheduler=SchedulerConfig(**(LIMITS | changes)),
        num_blocks=num_blocks,
    )
    core, clock = build_engine_core(config), Clock()
    core.observers.events.clock = clock
    return core, clock


def add(core: EngineCore, name: str, num_tokens: int, max_tokens: int = 4, first: int = 1, **values: Any) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    core.add_request(EngineCoreRequest(name, [first, *range(2, num_tokens + 1)], params, **values))


def run(core: EngineCore, clock: Clock, num_steps: int = 1_000_000) -> None:
    """Steps of one length each."""
    for _ in range(num_steps):
        if not core.has_unfinished_requests():
            return
        execute = core.runner.execute_model

        def slow(*arguments: Any, execute: Any = execute) -> Any:
            clock.now_s += STEP_S
            return execute(*arguments)

        core.runner.execute_model = slow  # type: ignore[method-assign]
        core.step()
        core.runner.execute_model = execute  # type: ignore[method-assign]


def log_of(core: EngineCore) -> RecordedRun:
    assert core.observers.step_log is not None
    core.observers.step_log.close()
    sink = core.observers.step_log.sink
    assert isinstance(sink, RingSink)
    return RecordedRun(sink.dump())


def outcomes(log: RecordedRun, found: RecordedRequests, change: str = "") -> dict[str, Outcome | None]:
    plane = recorded_plane(*log.header.configs())
    plane = changed_plane(plane, change) if change else plane
    again = rerun(found.requests, plane.build(), LinearCostModel(STEP_S, 0.0, 0.0, 0.0))
    return {one.request.request_id: outcome for one, outcome in zip(found.requests, again, strict=True)}


def assert_equal(found: RecordedRequests, again: dict[str, Outcome | None]) -> None:
    for one in found.requests:
        outcome = again[one.request.request_id]
        assert outcome is not None
        assert (outcome.num_tokens, outcome.num_preemptions) == (one.outcome.num_tokens, one.outcome.num_preemptions)
        for name in ("queue_s", "ttft_s", "e2e_s"):
            assert getattr(outcome, name) == pytest.approx(getattr(one.outcome, name), abs=1e-4), name


def staggered(core: EngineCore, clock: Clock, num_requests: int = 8, **values: Any) -> None:
    for number in range(num_requests):
        add(core, f"r{number}", 5 + 3 * (number % 4), 3 + number % 5, number, arrival_time_s=clock.now_s, **values)
        run(core, clock, 2)
    run(core, clock)


@pytest.mark.parametrize(
    ("num_blocks", "changes"),
    [
        (64, {}),
        (12, {}),
        (64, {"policy": "fair"}),
        (64, {"long_prefill_token_threshold": 4}),
    ],
)
def test_the_unchanged_settings_give_what_the_requests_got(num_blocks: int, changes: dict[str, Any]) -> None:
    core, clock = build(num_blocks, **changes)
    staggered(core, clock)
    log = log_of(core)
    found = requests_of_log(log)
    assert len(found.requests) == 8
    assert [seconds for _, seconds in found.steps] == pytest.approx([STEP_S] * len(found.steps))
    assert_equal(found, outcomes(log, found))


def test_preemptions_are_found_and_happen_again() -> None:
    core, clock = build(6)
    for name in ("a", "b"):
        add(core, name, 8, 12, ord(name), arrival_time_s=clock.now_s)
    run(core, clock)
    log = log_of(core)
    found = requests_of_log(log)
    assert sum(one.outcome.num_preemptions for one in found.requests) == 1
    assert_equal(found, outcomes(log, found))
    more = outcomes(log, found, "num_blocks=64")
    assert sum(outcome.num_preemptions for outcome in more.values() if outcome) == 0


def test_drafts_are_accepted_as_far_as_they_are_right() -> None:
    core, clock = build(model={"max_num_drafts": 4}, speculative=SpeculativeConfig("ngram", 4))
    staggered(core, clock)
    log = log_of(core)
    found = requests_of_log(log)
    assert_equal(found, outcomes(log, found))


def test_a_client_that_left_leaves_again() -> None:
    core, clock = build(max_num_seqs=1)
    add(core, "runs", 4, 10, 1, arrival_time_s=clock.now_s)
    add(core, "waits", 4, 10, 2, arrival_time_s=clock.now_s)
    run(core, clock, 3)
    core.abort_requests(["waits"])
    run(core, clock, 3)
    core.abort_requests(["runs"])
    add(core, "last", 4, 2, 3, arrival_time_s=clock.now_s)
    run(core, clock)
    log = log_of(core)
    found = requests_of_log(log)
    by_id = {one.request.request_id: one for one in found.requests}
    assert (by_id["waits"].is_cut, by_id["waits"].outcome.ttft_s) == (True, None)
    assert (by_id["runs"].is_cut, by_id["runs"].outcome.num_tokens) == (True, 6)
    again = outcomes(log, found)
    assert again["waits"] is not None
    assert again["waits"].ttft_s is None
    assert again["runs"] is not None
    assert again["runs"].num_tokens == 6
    assert again["last"] is not None
    assert again["last"].ttft_s == pytest.approx(by_id["last"].outcome.ttft_s, abs=1e-4)


def test_other_settings_give_others_a_shorter_wait() -> None:
    core, clock = build(max_num_seqs=1)
    add(core, "long", 4, 20, 1, arrival_time_s=clock.now_s)
    add(core, "short", 4, 1, 2, arrival_time_s=clock.now_s)
    run(core, clock)
    log = log_of(core)
    found = requests_of_log(log)
    before, after = outcomes(log, found)["short"], outcomes(log, found, "max_num_seqs=2")["short"]
    assert before is not None
    assert after is not None
    assert before.ttft_s == pytest.approx(21 * STEP_S, abs=1e-4)
    assert after.ttft_s == pytest.approx(STEP_S, abs=1e-4)


def test_an_arrival_on_another_clock_counts_from_the_step_that_saw_it() -> None:
    core, clock = build()
    add(core, "r", 4, arrival_time_s=5_000_000.0)
    run(core, clock)
    [one] = requests_of_log(log_of(core)).requests
    assert one.arrival_s == pytest.approx(100.0)
    assert one.outcome.ttft_s == pytest.approx(STEP_S, abs=1e-4)


def test_beams_are_left_out_and_counted() -> None:
    core, clock = build()
    params = SamplingParams(max_tokens=3, use_beam_search=True, logprobs=4)
    core.add_request(EngineCoreRequest("beam", [1, 2, 3], params))
    core.add_request(EngineCoreRequest("beam2", [1, 2, 3], params, fork_of="beam"))
    add(core, "plain", 4)
    run(core, clock)
    found = requests_of_log(log_of(core))
    assert [one.request.request_id for one in found.requests] == ["plain"]
    assert found.num_left_out > 0


def test_the_cost_model_keeps_the_sum_of_steps_of_a_busy_machine() -> None:
    steps = [(StepWork(0, rows, 10 * rows), 0.001 * rows * (3 if number % 2 else 1)) for number, rows in LOADS]
    model = fit_to_steps([*steps, (StepWork(0, 1, 10), 60.0)])  # one that compiled
    sums = sum(model.step_s(work) for work, _ in steps), sum(seconds for _, seconds in steps)
    assert sums[0] == pytest.approx(sums[1], rel=0.05)
    with pytest.raises(SimulationError, match="at least 16"):
        fit_to_steps(steps[:15])
    rng = random.Random(2)
    noise = [(StepWork(0, rng.randint(0, 3), rng.randint(0, 9)), rng.random() / 100) for _ in range(20)]
    with pytest.raises(SimulationError, match="fit no cost model"):
        fit_to_steps(noise)


class LastComeScheduler(Scheduler):
    """Serves one request at a time."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        super().__init__(replace(config, max_num_seqs=1), cache)


def test_a_control_plane_is_named_by_its_changes() -> None:
    core, clock = build()
    staggered(core, clock)
    log = log_of(core)
    plane = recorded_plane(*log.header.configs())
    changed = changed_plane(plane, "fair|max-num-batched-tokens=32, num_blocks=9|enable_prefix_caching=false")
    assert (changed.scheduler.policy, changed.scheduler.max_num_batched_tokens) == ("fair", 32)
    assert (changed.cache.num_blocks, changed.cache.enable_prefix_caching) == (9, False)
    found = requests_of_log(log)
    slower = outcomes(log, found, f"{__name__}:LastComeScheduler")
    assert max(one.queue_s or 0 for one in slower.values() if one) > 3 * max(
        one.outcome.queue_s or 0 for one in found.requests
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "1 to 512"),
        ("fastest", "fair"),
        ("max_rows=3", "max_num_seqs"),
        ("max_num_seqs=many", "a number"),
        ("max_num_seqs=0", "at least 1"),
        ("num_blocks=0", "at least 1"),
        ("policy=best", "policy must be one of"),
        ("enable_prefix_caching=1", "true or false"),
        ("speculative=ngram", "no setting"),
        ("json:", "no module:Class"),
        (":Class", "no module:Class"),
        ("|||", "no module:Class"),
        ("max_num_seqs=2,max-num-seqs=3", "max_num_seqs is given twice"),
        ("fair|fcfs", "policy is given twice"),
        ("json:loads,json:dumps", "a class is given twice"),
        ("no_such_module:Class", "cannot be imported"),
        ("json:decoder", "cannot be called"),
    ],
)
def test_what_names_no_control_plane_is_said_in_one_line(text: str, words: str) -> None:
    core, _ = build()
    with pytest.raises(PlaneError, match=words) as raised:
        changed_plane(recorded_plane(*log_of(core).header.configs()), text)
    assert "\n" not in str(raised.value)


def test_requests_end_with_a_sentence_where_a_scheduler_schedules_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "schedule", lambda scheduler, now_s: SchedulerOutput(1, [], [], [], 0))
    monkeypatch.setattr(Scheduler, "update_from_output", lambda scheduler, *results: EngineCoreOutputs([]))
    scheduler = build_scheduler(SchedulerConfig(**LIMITS), CacheConfig(8, 4))
    request = EngineCoreRequest("r", [1, 2, 3], SamplingParams(max_tokens=1))
    with pytest.raises(SimulationError, match=r"the scheduler makes no progress at 3\.000 s"):
        rerun([RecordedRequest(request, 3.0)], scheduler, LinearCostModel())
