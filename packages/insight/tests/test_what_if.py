"""Estimates of what one changed setting would have done, for requests whose causes are known."""

from __future__ import annotations

import math
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_client.prediction.cost_model import LinearCostModel, step_work
from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_insight.explain import (
    Explanation,
    Limits,
    add_deadline,
    add_estimates,
    explain,
    workload_of_log,
    workload_of_steps,
)
from llmstack_insight.explain.what_if import MAX_ROWS_IN_ALL, Times, Work, run_again
from llmstack_insight.explain.workload import Arrival, Workload
from llmstack_insight.steps_of_log import steps_of_log
from llmstack_step_log import RecordedRun, read_step_log
from llmstack_step_log.records import RequestAdded
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams, SchedulerOutput

LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 16}
MODEL = LinearCostModel(0.01, 0.001, 0.0005, 0.0)


class Clock:
    """Goes on by what the cost model says of each step."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Recorded:
    """An engine core over a runner without a model, whose steps take what `MODEL` says, with a log."""

    def __init__(self, path: Path, num_blocks: int = 64, **changes: Any) -> None:
        limits = LIMITS | {name: value for name, value in changes.items() if name in LIMITS}
        config = EngineConfig(
            ModelRunnerConfig("echo", block_size=4, **limits), runner="echo",
            scheduler=SchedulerConfig(**(LIMITS | changes)), num_blocks=num_blocks, record_steps=str(path),
        )  # fmt: skip
        self.clock, self.path = Clock(), path
        self.core = build_engine_core(config)
        self.core.observers.events.clock = self.clock
        runner = self.core.runner
        execute = runner.execute_model

        def execute_model(scheduled: SchedulerOutput) -> Any:
            if scheduled.scheduled_requests:
                self.clock.now_s += MODEL.step_s(step_work(scheduled.scheduled_requests))
            return execute(scheduled)

        runner.execute_model = execute_model  # type: ignore[method-assign]

    def add(self, name: str, num_tokens: int, max_tokens: int = 4, first: int = 1, **values: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.came_s = self.clock.now_s
        tokens = [first, *range(2, num_tokens + 1)]
        self.core.add_request(EngineCoreRequest(name, tokens, params, arrival_time_s=self.clock.now_s, **values))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.core.step()

    def end(self) -> RecordedRun:
        while self.core.has_unfinished_requests():
            self.core.step()
        self.core.shutdown()
        return read_step_log(self.path)


def estimated(
    run: RecordedRun,
    name: str,
    knows_tokens: bool = True,
    max_rows: int = 10_000,
    num_left: int = 100_000,
    until_s: float = math.inf,
) -> Explanation:
    scheduler, cache = run.header.configs()
    log = steps_of_log(run, 10_000)
    made = explain(log, name, Limits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens))
    workload = workload_of_log(run, log, name) if knows_tokens else workload_of_steps(log, name)
    add_estimates(made, log, workload, scheduler, cache, Work(max_rows, num_left, until_s))
    return made


@pytest.fixture
def behind_a_long_prompt(tmp_path: Path) -> RecordedRun:
    recorded = Recorded(tmp_path / "steps.log")
    recorded.add("before", 8, max_tokens=8)
    recorded.step(12)
    recorded.add("long", 200, first=77)
    recorded.step()
    recorded.add("r", 8, first=99)
    return recorded.end()


@pytest.mark.parametrize("knows_tokens", [True, False], ids=["tokens", "lengths"])
def test_the_replay_without_a_change_is_what_was_measured(
    behind_a_long_prompt: RecordedRun, knows_tokens: bool
) -> None:
    replayed = estimated(behind_a_long_prompt, "r", knows_tokens).facts["replayed"]
    assert replayed["unchanged"]["total_ms"] == pytest.approx(replayed["measured"]["total_ms"], rel=0.05)
    assert replayed["unchanged"]["ttft_ms"] == pytest.approx(replayed["measured"]["ttft_ms"], rel=0.05)
    assert replayed["error"] < 0.05
    assert replayed["has_tokens"] is knows_tokens


@pytest.mark.parametrize("knows_tokens", [True, False], ids=["tokens", "lengths"])
def test_a_long_prompt_ahead_asks_for_shorter_parts_of_prompts(
    behind_a_long_prompt: RecordedRun, knows_tokens: bool
) -> None:
    found = estimated(behind_a_long_prompt, "r", knows_tokens)
    assert found.facts["queue_cause"] == "token budget"
    text = " ".join(found.sentences)
    assert "With --long-prefill-token-threshold 4 it would have taken about " in text
    assert text.count("Alone, ") == 1
    alone = found.facts["replayed"]["alone"]
    # Its prompt of 8 tokens in one step and 3 decodes: nothing of the long prompt.
    assert alone["ttft_ms"] == pytest.approx(18, abs=2)
    assert alone["total_ms"] == pytest.approx(18 + 3 * 10.5, abs=4)


def test_a_preemption_asks_for_more_blocks(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "steps.log", num_blocks=9)
    recorded.add("first", 11, max_tokens=20)
    recorded.add("second", 3, max_tokens=30, first=99)
    found = estimated(recorded.end(), "second")
    assert found.facts["preemptions"] == 1
    assert "It was preempted since first needed blocks: " in " ".join(found.sentences)
    assert "With 18 blocks of KV cache it would have taken about " in " ".join(found.sentences)


def test_taken_places_ask_for_more_places(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "steps.log", max_num_seqs=1)
    recorded.add("a", 4, max_tokens=40)
    recorded.step(2)
    recorded.add("r", 4, first=99)
    found = estimated(recorded.end(), "r")
    assert found.facts["queue_cause"] == "places"
    assert "With --max-num-seqs 2 it would have taken about " in " ".join(found.sentences)


def test_a_request_of_low_number_asks_for_the_policy_by_priority(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "steps.log", max_num_batched_tokens=16, long_prefill_token_threshold=16)
    for number in range(6):
        recorded.add(f"bulk{number}", 60, first=number + 10, priority=1)
    recorded.step()
    recorded.add("urgent", 8, first=99, priority=0)
    found = estimated(recorded.end(), "urgent")
    (policy,) = [one for one in found.facts["replayed"]["changes"] if one["change"] == "--scheduling-policy priority"]
    assert policy["ttft_ms"] < found.facts["replayed"]["unchanged"]["ttft_ms"]


def test_a_request_that_nothing_held_up_gets_no_advice(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "steps.log")
    recorded.add("r", 8, max_tokens=20)
    found = estimated(recorded.end(), "r")
    assert "No single change of those tried would have helped" in found.sentences[-1]
    assert "--max-num-seqs 8" in found.sentences[-1]


def test_what_was_cached_before_the_kept_steps_is_cached_again(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "steps.log")
    recorded.add("before", 100, max_tokens=2)
    recorded.step(20)
    recorded.add("r", 100, max_tokens=12)
    run = recorded.end()
    log = steps_of_log(run, 12)
    assert {row.request_id for record in log.steps for row in record.rows} == {"r"}
    workload = workload_of_log(run, log, "r")
    assert workload is not None
    assert workload.own.num_found_tokens == 96
    again = run_again(workload, *run.header.configs(), MODEL)
    # 4 tokens are left to compute, in one step.
    assert again.ttft_s == pytest.approx(0.014)


def test_a_request_that_was_aborted_ends_where_its_tokens_do(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "steps.log")
    recorded.add("other", 8, max_tokens=40)
    recorded.add("r", 8, max_tokens=40, first=99)
    recorded.step(10)
    recorded.core.abort_requests(["r"])
    run = recorded.end()
    workload = workload_of_log(run, steps_of_log(run, 10_000), "r")
    assert workload is not None
    assert len(workload.own.output_token_ids) == 10
    again = run_again(workload, *run.header.configs(), MODEL)
    assert again.total_s == pytest.approx(again.ttft_s + 9 * 0.011)


def test_too_much_work_gives_no_estimate_and_says_so(behind_a_long_prompt: RecordedRun) -> None:
    found = estimated(behind_a_long_prompt, "r", max_rows=3)
    assert found.facts["no_estimate"] == "too much happened while it was there"
    assert found.sentences[-1].startswith("There is no estimate of other settings: ")
    assert "replayed" not in found.facts


def test_a_server_that_is_too_busy_gives_no_estimate_and_says_so(behind_a_long_prompt: RecordedRun) -> None:
    found = estimated(behind_a_long_prompt, "r", until_s=0)
    assert found.facts["no_estimate"] == "the server is too busy"


def test_changes_for_which_no_time_is_left_are_named(
    behind_a_long_prompt: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = count()
    monkeypatch.setattr(Work, "is_late", property(lambda _: next(readings) < 0))
    whole = estimated(behind_a_long_prompt, "r").facts["replayed"]["changes"]
    last, readings = next(readings) - 10, count()
    monkeypatch.setattr(Work, "is_late", property(lambda _: next(readings) > last))
    found = estimated(behind_a_long_prompt, "r")
    replayed = found.facts["replayed"]
    assert [one["change"] for one in replayed["changes"]] + replayed["not_tried"] == [one["change"] for one in whole]
    assert replayed["not_tried"]
    assert found.sentences[-1].startswith("The server is too busy to try more: --")


def test_changes_for_which_no_work_is_left_are_named(behind_a_long_prompt: RecordedRun) -> None:
    work = Work()
    workload = workload_of_log(behind_a_long_prompt, steps_of_log(behind_a_long_prompt, 10_000), "r")
    assert workload is not None
    run_again(workload, *behind_a_long_prompt.header.configs(), MODEL, work)
    num_rows = MAX_ROWS_IN_ALL - work.num_left
    whole = estimated(behind_a_long_prompt, "r").facts["replayed"]
    found = estimated(behind_a_long_prompt, "r", num_left=4 * num_rows)
    replayed = found.facts["replayed"]
    assert replayed["changes"] == whole["changes"][: len(replayed["changes"])]
    names = [change["change"] for change in replayed["changes"]] + replayed["not_tried"]
    assert names == [change["change"] for change in whole["changes"]]
    assert 0 < len(replayed["changes"]) < 4
    assert found.sentences[-1].startswith("Too much happened while it was there to try more: --")


def test_a_replay_that_is_far_off_gives_no_estimate(
    behind_a_long_prompt: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def far_off(workload: Workload, *_: object) -> Times:
        return Times(10.0, 20.0)

    monkeypatch.setattr("llmstack_insight.explain.estimates.run_again", far_off)
    found = estimated(behind_a_long_prompt, "r")
    assert "a replay with the settings of the run is off by " in found.facts["no_estimate"]
    assert "changes" not in found.facts["replayed"]


def test_a_log_is_read_no_further_than_its_request_needs(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "steps.log")
    recorded.add("r", 8, max_tokens=10)
    recorded.step(12)
    for number in range(20):
        recorded.add(f"later{number}", 8, first=number + 10, max_tokens=10)
    run = recorded.end()
    assert len(steps_of_log(run, 10_000, lambda name: name == "r").steps) == 15
    assert len(steps_of_log(run, 10_000).steps) > 50


def test_steps_that_are_scheduled_early_do_not_overlap_in_a_log(tmp_path: Path) -> None:
    config = EngineConfig(
        ModelRunnerConfig("echo", block_size=4, **LIMITS), runner="echo", scheduler=SchedulerConfig(**LIMITS),
        num_blocks=64, record_steps=str(tmp_path / "steps.log"), async_scheduling=True,
    )  # fmt: skip
    core = build_engine_core(config)
    core.add_request(EngineCoreRequest("r", [1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True)))
    while core.has_unfinished_requests():
        core.step()
    core.shutdown()
    steps = steps_of_log(read_step_log(tmp_path / "steps.log"), 10_000).steps
    assert all(sum(record.phases) > 0 for record in steps)
    for before, after in pairwise(steps):
        assert before.start_s + sum(before.phases) <= after.start_s + 1e-9


def with_deadline(path: Path, given_s: float, *, has_long_prompt: bool = True, is_cut: bool = False) -> Explanation:
    recorded = Recorded(path)
    recorded.add("before", 8, max_tokens=12)
    recorded.step(16)
    if has_long_prompt:
        recorded.add("long", 200, first=77)
        recorded.step()
    recorded.add("r", 64, 99 if is_cut else 4, first=99, deadline_s=recorded.clock.now_s + given_s)
    while is_cut and recorded.clock.now_s < recorded.came_s + given_s:
        recorded.step()
    if is_cut:
        recorded.core.abort_requests(["r"])
    run = recorded.end()
    scheduler, cache = run.header.configs()
    log = steps_of_log(run, 10_000)
    made = explain(log, "r")
    (request,) = [
        one.request for one in run.events() if isinstance(one, RequestAdded) and one.request.request_id == "r"
    ]
    add_deadline(made, log, Arrival(request, 0.0), scheduler, cache)
    return made


def deadline_sentence(found: Explanation) -> str:
    (sentence,) = [one for one in found.sentences if "deadline" in one]
    return sentence


def test_a_deadline_that_cannot_be_met_is_named(tmp_path: Path) -> None:
    # Four steps of 16 tokens take 104 ms, whatever else there is.
    found = with_deadline(tmp_path / "steps.log", 0.05)
    assert (found.facts["deadline"], found.facts["deadline_ms"]) == ("unreachable", 50.0)
    assert deadline_sentence(found).startswith("Its deadline of 50 ms could not be met: by estimate, even alone ")


def test_a_deadline_that_others_made_it_miss_is_distinguished(tmp_path: Path) -> None:
    found = with_deadline(tmp_path / "steps.log", 0.3)
    assert found.facts["deadline"] == "missed"
    assert deadline_sentence(found).startswith("It missed its deadline of 300 ms: by estimate, alone the 4 tokens ")


def test_an_answer_that_its_deadline_cut_is_said_to_be_longer(tmp_path: Path) -> None:
    found = with_deadline(tmp_path / "steps.log", 0.5, is_cut=True)
    assert (found.facts["status"], found.facts["deadline"]) == ("finished_aborted", "missed")
    sentence = deadline_sentence(found)
    assert sentence.startswith("It missed its deadline of 500 ms: by estimate, alone the ")
    assert sentence.endswith(" ms, and more were to come.")


def test_a_deadline_that_was_met_is_one_sentence(tmp_path: Path) -> None:
    found = with_deadline(tmp_path / "steps.log", 0.3, has_long_prompt=False)
    assert (found.facts["deadline"], deadline_sentence(found)) == ("met", "It met its deadline of 300 ms.")
