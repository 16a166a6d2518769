"""Explanations of waits for adapters, grammars and deadlines, of swaps, of drafts, and of an engine core's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_core_helpers.small_cores import LIMITS, add, build, run
from engine_core_helpers.steps import step_record

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core.events import note_of
from llmstack_engine_core.messages.recent_steps import RECENT_STEPS
from llmstack_insight.explain import Explanation, Limits, add_estimates_of_engine, explain, workload_of_steps
from llmstack_insight.explain.what_if import changes_to_try
from llmstack_insight.steps_of_log import steps_of_log
from llmstack_step_log import FileSink, LoggedScheduler, LogHeader, StepLog, read_step_log
from llmstack_step_log.control_plane import CacheConfig, build_scheduler
from llmstack_step_log.packing import pack, unpack
from llmstack_types import (
    EngineCoreRequest,
    ModelRunnerOutput,
    RequestEvent,
    RequestNote,
    RequestStatus,
    SamplingParams,
    ScheduledRequest,
    StepRecording,
    StructuredOutputsParams,
)

CAME, ENDED, CUT = RequestStatus.WAITING, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED


def log_of(
    rows: list[list[ScheduledRequest]], events: list[tuple[str, RequestStatus, float]], **notes: RequestNote
) -> StepRecording:
    """Steps of half a second, one after the other since second 10."""
    steps = [step_record(number, own, 9.5 + number / 2, num_free_blocks=9) for number, own in enumerate(rows, 1)]
    return StepRecording(99.0, steps, [RequestEvent(*one) for one in events], notes=notes)


def row(name: str, num_computed: int, num_tokens: int = 1, drafts: list[int] | None = None) -> ScheduledRequest:
    return ScheduledRequest(name, num_computed, num_tokens + len(drafts or ()), [], drafts or [])


def text_of(found: Explanation) -> str:
    return " ".join(found.sentences)


def waiting_for_a_place() -> StepRecording:
    others = [[row("other", 4 + number), row("base", number + 1)] for number in range(4)]
    return log_of(
        [[row("other", 0, 4)], *others, [row("r", 0, 6)]],
        [("r", CAME, 10.1)],
        r=RequestNote(lora_name="mine"), other=RequestNote(lora_name="theirs"),
    )  # fmt: skip


def test_a_wait_for_a_place_of_adapters_is_named() -> None:
    log = waiting_for_a_place()
    found = explain(log, "r", Limits(8, 64, 1))
    assert found.facts["queue_cause"] == "adapters"
    assert "all places for adapters were taken by others (--max-loras 1), and 5 steps were computed" in text_of(found)
    for limits in (Limits(8, 64, 2), Limits(8, 64), Limits(8, 64, 0)):
        assert explain(log, "r", limits).facts["queue_cause"] == "others"
    same = log._replace(notes=dict.fromkeys(("r", "other"), RequestNote(lora_name="mine")))
    assert explain(same, "r", Limits(8, 64, 1)).facts["queue_cause"] == "others"


def test_more_places_for_adapters_are_tried_where_requests_had_more_adapters() -> None:
    workload = workload_of_steps(waiting_for_a_place(), "r")
    assert workload is not None
    cache = CacheConfig(64, 4)
    few, enough = (SchedulerConfig(max_model_len=64, max_loras=number, **_LIMITS) for number in (1, 2))
    assert "--max-loras 2" in [change.name for change in changes_to_try(workload, few, cache)]
    assert not [change for change in changes_to_try(workload, enough, cache) if "loras" in change.name]


_LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}


def test_drafts_are_counted_by_what_became_of_them() -> None:
    rows = [
        [row("r", 0, 8)], [row("r", 8, 1, [1, 2, 3])], [row("r", 11, 1, [4, 5])], [row("r", 12)], [row("r", 13)],
    ]  # fmt: skip
    found = explain(log_of(rows, [("r", CAME, 10.0), ("r", ENDED, 12.5)]), "r")
    assert (found.facts["draft_tokens"], found.facts["accepted_draft_tokens"]) == (5, 2)
    assert ", with 5 drafted tokens to verify: 2 of them spared a step each." in text_of(found)


def test_a_swap_is_said_to_be_one() -> None:
    rows = [[row("r", 0, 4)], [row("r", 4)], [row("other", 9)], [row("r", 5)]]
    found = explain(log_of(rows, [("r", CAME, 10.0), ("r", RequestStatus.SWAPPED, 11.0), ("r", ENDED, 12.0)]), "r")
    assert (found.facts["swaps"], found.facts["recomputed_tokens"]) == (1, 0)
    assert "its blocks were copied to the host's memory: it went on after 500 ms." in text_of(found)


@pytest.mark.parametrize(
    ("num_tokens", "sentence"),
    [
        (7, "It had come 3.5 s before, to another engine core, which generated 7 tokens of its answer"),
        (0, "It had come 3.5 s before, to another engine core"),
    ],
)
def test_the_time_with_another_engine_core_is_named(num_tokens: int, sentence: str) -> None:
    request = EngineCoreRequest("r", [1], SamplingParams(), arrival_time_s=6.5, output_token_ids=(1,) * num_tokens)
    log = log_of([[row("r", 0, 4 + num_tokens)]], [("r", CAME, 10.0), ("r", ENDED, 10.5)], r=note_of(request, 9.0))
    found = explain(log, "r")
    assert found.sentences[0].startswith("It ended (length limit), 500 ms after it came here, ")
    assert found.sentences[1] == f"{sentence}: what follows is of the time since."
    assert found.facts["earlier_ms"] == 3500.0
    assert not any(note_of(request, 6.0)[2:])  # this engine core ran when it came
    far = log._replace(notes={"r": RequestNote(num_tokens, earlier_s=-5e5)})  # by the clock of another machine
    assert "earlier_ms" not in explain(far, "r").facts


@pytest.mark.parametrize(
    ("given_s", "status", "deadline", "sentence"),
    [
        (1.5, ENDED, "met", "It met its deadline of 1.5 s."),
        (0.9, ENDED, "missed", "It missed its deadline of 900 ms."),
        (1.0, CUT, "missed", "It missed its deadline of 1.0 s."),
        (9.0, CUT, None, "It was aborted before its deadline of 9.0 s."),
    ],
)
def test_a_running_server_knows_of_deadlines(
    given_s: float, status: RequestStatus, deadline: str | None, sentence: str
) -> None:
    rows = [[row("r", 0, 4)], [row("r", 4)]]
    log = log_of(rows, [("r", CAME, 10.0), ("r", status, 11.0)], r=RequestNote(given_s=given_s))
    found = explain(log, "r")
    assert (found.facts["deadline_ms"], found.facts.get("deadline")) == (1000 * given_s, deadline)
    assert sentence in found.sentences
    running = explain(log._replace(events=log.events[:1]), "r")
    assert ("deadline" in running.facts) == (given_s < 1)


def test_a_running_server_says_that_a_deadline_could_not_be_met() -> None:
    core = build()
    for number in range(8):
        add(core, f"before{number}", 20, first=number + 1)
        run(core)
    add(core, "r", 90, first=99, arrival_time_s=core.now_s(), deadline_s=core.now_s() + 1e-6)
    run(core)
    log = core.recent_steps(0)
    found = explain(log, "r", Limits(4, 16))
    assert found.facts["deadline"] == "missed"
    settings = {"max_num_seqs": LIMITS["max_num_seqs"], "max_num_batched_tokens": LIMITS["max_num_batched_tokens"]}
    add_estimates_of_engine(found, log, core.ready, settings, True)
    assert found.facts["deadline"] == "unreachable"
    (sentence,) = [one for one in found.sentences if "deadline" in one]
    assert sentence.startswith("Its deadline of 0 ms could not be met: by estimate, even alone the 4 tokens")


class HeldRun:
    """A log of requests that come at second 1 and are queued when they are `held_s` older."""

    def __init__(self, path: Path) -> None:
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, max_loras=2)
        self.log = StepLog(LogHeader.of(config, CacheConfig(64, 4), {}), FileSink(str(path)))
        self.scheduler = LoggedScheduler(build_scheduler(config, CacheConfig(64, 4)), self.log)
        self.path = path

    def steps(self, held_s: float, **values: Any) -> StepRecording:
        grammar = values.pop("grammar", None)
        params = SamplingParams(max_tokens=1, ignore_eos=True, structured_outputs=grammar)
        request = EngineCoreRequest("r", [1, 2, 3], params, arrival_time_s=1.0, **values)
        self.scheduler.add_request(request)
        scheduled = self.scheduler.schedule(1.0 + held_s)
        self.scheduler.update_from_output(scheduled, ModelRunnerOutput(["r"], [[7]]), 1.5 + held_s)
        self.log.close()
        return steps_of_log(read_step_log(self.path), 100)


@pytest.mark.parametrize(
    ("held_s", "values", "fact"),
    [
        (0.25, {"grammar": StructuredOutputsParams(regex="a")}, "waiting_for_grammar_ms"),
        (0.25, {"lora_name": "mine"}, "waiting_for_adapter_ms"),
        (0.001, {"lora_name": "mine"}, None),  # on its way between two processes
        (0.25, {}, None),
        (9e5, {"grammar": StructuredOutputsParams(regex="a")}, None),  # by the clock of another machine
    ],
)
def test_a_log_tells_how_long_a_request_was_held(
    tmp_path: Path, held_s: float, values: dict[str, Any], fact: str | None
) -> None:
    found = explain(HeldRun(tmp_path / "steps.log").steps(held_s, **values), "r")
    held = {name: ms for name, ms in found.facts.items() if name.startswith("waiting_for")}
    assert held == ({} if fact is None else {fact: 250.0})
    assert found.facts["total_ms"] == (750.0 if fact else 500.0)


def test_a_message_may_have_two_rows_of_one_request_in_a_step() -> None:
    log = log_of([[row("r", 0, 4), row("r", 4)], [row("other", 0)]], [("r", CAME, 10.0)])
    decoded = RECENT_STEPS.unpack(unpack(pack(RECENT_STEPS.pack(log, "recording")), list), "recording")
    named = [[one.request_id for one in step.rows] for step in decoded.steps]
    assert named == [["r", "r"], ["other"]]
