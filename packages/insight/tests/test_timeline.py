"""Steps as a drawing: runs of requests, and the page that holds them."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it ships no types
from hypothesis import given
from hypothesis import strategies as st

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_engine_core.messages.recent_steps import RECENT_STEPS
from llmstack_engine_core.row_columns import RowColumns
from llmstack_insight.commands.replay import ReplayCommand
from llmstack_insight.steps_of_log import steps_of_log
from llmstack_insight.timeline import timeline_of, timeline_page
from llmstack_step_log import FileSink, LoggedScheduler, LogHeader, StepLog, read_step_log
from llmstack_step_log.control_plane import CacheConfig, build_scheduler
from llmstack_types import (
    EngineCoreRequest,
    ModelRunnerConfig,
    ModelRunnerOutput,
    SamplingParams,
    ScheduledRequest,
    SchedulerStats,
    StepPhases,
    StepRecord,
    StepRecording,
)


def step(number: int, *rows: ScheduledRequest) -> StepRecord:
    return StepRecord(float(number), StepPhases(0.0, 0.001, 0.0), SchedulerStats(number, num_blocks=8), rows)


def row(name: str, num_tokens: int, num_drafts: int = 0) -> ScheduledRequest:
    return ScheduledRequest(name, 0, num_tokens, [1], [7] * num_drafts)


def runs(*steps: StepRecord) -> list[list[object]]:
    return timeline_of(StepRecording(9.0, steps, ()))["runs"]


def as_read(log: StepRecording) -> StepRecording:
    """What a server gets of it from its engine core."""
    return RECENT_STEPS.unpack(msgpack.unpackb(msgpack.packb(RECENT_STEPS.pack(log, "recording"))), "recording")


def test_consecutive_steps_of_a_kind_are_one_run() -> None:
    chunks = [step(1, row("r", 8)), step(2, row("r", 5)), step(3, row("r", 1)), step(4, row("r", 1))]
    assert runs(*chunks) == [["r", 1, 2, "p", 13, 0, 0, [1, 1]], ["r", 3, 4, "d", 2, 0, 0, [1, 1]]]


def test_a_step_without_the_request_ends_its_run() -> None:
    assert runs(step(1, row("r", 1)), step(2, row("s", 1)), step(3, row("r", 1))) == [
        ["r", 1, 1, "d", 1, 0, 0, [1]], ["s", 2, 2, "d", 1, 0, 0, [1]], ["r", 3, 3, "d", 1, 0, 0, [1]],
    ]  # fmt: skip


def test_drafts_make_no_prefill_of_a_decode() -> None:
    assert runs(step(1, row("r", 4, num_drafts=3))) == [["r", 1, 1, "d", 4, 3, 0, [1]]]


rows_of_steps = st.lists(
    st.tuples(
        st.integers(1, 2),
        st.dictionaries(
            st.sampled_from("rstu"), st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4
        ),
    ),
    max_size=8,
)


@given(rows_of_steps)
def test_runs_are_the_rows_of_the_steps(drawn: list[tuple[int, dict[str, tuple[int, int]]]]) -> None:
    steps, number = [], 0
    expected: dict[tuple[int, str], tuple[str, int, int]] = {}
    for skip, rows in drawn:
        number += skip
        made = [row(name, count, min(drafts, count - 1)) for name, (count, drafts) in rows.items()]
        steps.append(step(number, *made))
        for one in made:
            num_drafts = len(one.draft_token_ids)
            kind = "p" if one.num_scheduled_tokens - num_drafts > 1 else "d"
            expected[number, one.request_id] = kind, one.num_scheduled_tokens, num_drafts
    found = runs(*steps)
    covered = {(at, run[0]): run[3] for run in found for at in range(run[1], run[2] + 1)}  # type: ignore[call-overload]
    assert covered == {key: kind for key, (kind, _, _) in expected.items()}
    for name, first, last, _, num_tokens, num_drafts, _, blocks in found:
        inside = [expected[at, name] for at in range(first, last + 1)]  # type: ignore[call-overload,index]
        assert (num_tokens, num_drafts) == (sum(one[1] for one in inside), sum(one[2] for one in inside))
        assert blocks == [1] * len(inside)
    log = StepRecording(9.0, steps, ())
    assert timeline_of(as_read(log)) == timeline_of(log)
    own = timeline_of(log, is_shown=lambda name: name == "r")
    assert own["runs"] == [[*run[:7], []] for run in found if run[0] == "r"]
    assert [one[0] for one in own["steps"]] == [at for at, name in expected if name == "r"]


def test_rows_that_are_the_same_in_step_after_step_are_read_once() -> None:
    decodes = [[row("r", 1), row("s", 4, num_drafts=3)], [row("r", 1), row("s", 1)], [row("r", 3), row("s", 1)]]
    log = StepRecording(9.0, [step(number, *rows) for number, rows in enumerate(3 * decodes, 1)], ())
    read = as_read(log)
    first, *others = [RowColumns.of(record.rows).request_ids for record in read.steps]
    assert all(request_ids is first for request_ids in others)
    assert timeline_of(read) == timeline_of(log)


def test_text_of_ids_cannot_leave_the_element_that_holds_it() -> None:
    page = timeline_page({"steps": [], "runs": [["</script><img src=x>", 1, 1, "d", 1, 0, 0]], "events": []}).text
    (held,) = re.findall(r'<script id="timeline" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert json.loads(held)["runs"][0][0] == "</script><img src=x>"
    assert "<img" not in page


def test_a_log_is_drawn_as_a_recorder_saw_it(tmp_path: Path) -> None:
    log = tmp_path / "steps.log"
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    core = build_engine_core(
        EngineConfig(
            ModelRunnerConfig("echo", block_size=4, **limits), runner="echo", scheduler=SchedulerConfig(**limits),
            num_blocks=9, record_steps=str(log),
        )
    )  # fmt: skip
    for number in range(4):
        core.add_request(
            EngineCoreRequest(f"r-{number}", [1 + number] * 11, SamplingParams(max_tokens=9, ignore_eos=True))
        )
    while core.has_unfinished_requests():
        core.step()
    recorded = timeline_of(core.recent_steps(0))
    core.shutdown()
    drawn = timeline_of(steps_of_log(read_step_log(log), max_steps=5000))
    assert any(event[2] == "preempted" for event in drawn["events"])
    assert drawn["runs"] == recorded["runs"]
    assert [event[::2] for event in drawn["events"]] == [event[::2] for event in recorded["events"]]
    page = tmp_path / "steps.html"
    assert run_replay(log, page) == 0
    (held,) = re.findall(r'type="application/json">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert json.loads(held)["runs"] == recorded["runs"]
    assert run_replay(log, tmp_path / "missing" / "steps.html") == 2


def run_replay(log: Path, page: Path) -> int:
    parser = argparse.ArgumentParser()
    command = ReplayCommand()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(log), "--page", str(page)]))


def predictions_of(path: Path, page: Path) -> list[list[Any]]:
    """Those on the page of a log."""
    assert run_replay(path, page) == 0
    (held,) = re.findall(r'type="application/json">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    found: list[list[Any]] = json.loads(held)["predictions"]
    return found


def test_a_page_of_a_log_knows_what_the_requests_before_have_asked_for(tmp_path: Path) -> None:
    limits = SchedulerConfig(max_model_len=512, max_num_seqs=2, max_num_batched_tokens=64)
    cache, path = CacheConfig(400, block_size=4), tmp_path / "steps.log"
    log = StepLog(LogHeader.of(limits, cache, {}), FileSink(str(path)))
    scheduler = LoggedScheduler(build_scheduler(limits, cache), log)
    now_s, number = 100.0, 0
    while number < 120 or scheduler.has_unfinished_requests():
        if number < 120 and now_s >= 100.0 + 0.02 * number:  # three times as often as there are places for
            params = SamplingParams(max_tokens=(2, 100, 9)[number % 3], ignore_eos=True)
            request = EngineCoreRequest(f"r-{number}", [number + 1] * 15, params, arrival_time_s=now_s)
            scheduler.add_request(request)
            number += 1
        if not scheduler.has_unfinished_requests():
            now_s += 0.001
            continue
        scheduled = scheduler.schedule(now_s)
        rows = scheduled.scheduled_requests
        now_s += 0.001 * (1 + sum(one.num_scheduled_tokens for one in rows))
        output = ModelRunnerOutput([one.request_id for one in rows], [[7] for _ in rows])
        scheduler.update_from_output(scheduled, output, now_s)
    log.close()
    found = predictions_of(path, tmp_path / "steps.html")[20:]
    share_met = sum(abs(predicted - real) <= 0.25 * predicted for _, predicted, real in found) / len(found)
    assert len(found) > 80
    assert share_met > 0.9


def test_a_page_of_a_log_has_predicted_first_tokens_beside_real_ones(tmp_path: Path) -> None:
    limits = SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    cache, path = CacheConfig(64, block_size=4), tmp_path / "steps.log"
    log = StepLog(LogHeader.of(limits, cache, {}), FileSink(str(path)))
    scheduler = LoggedScheduler(build_scheduler(limits, cache), log)
    now_s = 100.0
    for number in range(30):  # one after the other: a prompt takes 16 ms, a decode 1 ms
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        scheduler.add_request(EngineCoreRequest(f"r-{number}", [number + 1] * 15, params, arrival_time_s=now_s))
        while scheduler.has_unfinished_requests():
            scheduled = scheduler.schedule(now_s)
            rows = scheduled.scheduled_requests
            now_s += 0.001 * (1 + sum(one.num_scheduled_tokens for one in rows) - len(rows)) + 0.001
            output = ModelRunnerOutput([one.request_id for one in rows], [[7] for _ in rows])
            scheduler.update_from_output(scheduled, output, now_s)
    log.close()
    predictions = predictions_of(path, tmp_path / "steps.html")
    first = 30 - len(predictions)
    assert 3 <= first <= 16
    assert [name for name, _, _ in predictions] == [f"r-{number}" for number in range(first, 30)]
    assert all(real == 16.0 for _, _, real in predictions)
    assert all(abs(predicted - 16.0) < 2.0 for _, predicted, _ in predictions)
