"""Progress of an engine core: what is a hang and what is a long step."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from llmstack_engine_core.progress import SLOWDOWN, HangWatch, SharedProgress, make_progress_file
from llmstack_engine_core.step_progress import ProgressHook, StepTimes
from llmstack_types import (
    EncoderWork,
    EngineCoreOutputs,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerStats,
    StepPhases,
    StepRecord,
)


@pytest.fixture
def ends() -> tuple[SharedProgress, SharedProgress]:
    """The memory as its writer and its reader have mapped it."""
    fd = make_progress_file()
    try:
        return SharedProgress(fd), SharedProgress(fd)
    finally:
        os.close(fd)


def watched_s(watch: HangWatch, until_s: float, start_s: float = 0.0) -> float | None:
    """When the watch finds a hang, if it looks once a second."""
    for second in range(int(start_s), int(until_s)):
        if watch.look(float(second)):
            return float(second)
    return None


def test_what_one_process_writes_the_other_reads(ends: tuple[SharedProgress, SharedProgress]) -> None:
    writer, reader = ends
    assert reader.count == 0
    writer.advance(2.5)
    assert (reader.count, reader.expected_s) == (1, 2.5)
    writer.advance()
    assert (reader.count, reader.expected_s) == (2, 0.0)


def test_a_process_without_progress_hangs_and_one_that_loads_does_not(
    ends: tuple[SharedProgress, SharedProgress],
) -> None:
    writer, reader = ends
    watch = HangWatch(reader, 60.0)
    assert watched_s(watch, 1000) is None
    writer.advance()
    assert watched_s(watch, 1200, start_s=1000) == 1061


class LayeredRunner:
    """Reports progress as a model runner does at each layer."""

    def report_progress_to(self, report: Callable[[], None]) -> None:
        self.report = report


FIRST_STEP = SchedulerOutput(0, [], [ScheduledRequest("r", 0, 512, [])], [], 512)


def test_a_first_step_may_take_long_while_it_reports_its_layers(
    ends: tuple[SharedProgress, SharedProgress],
) -> None:
    writer, reader = ends
    hook, runner, watch = ProgressHook(writer, 30.0), LayeredRunner(), HangWatch(reader, 60.0)
    hook.listen_to(runner)
    hook.on_scheduled(FIRST_STEP)
    assert reader.expected_s == 3.0
    for layer in range(40):  # each takes 50 s to compile
        assert watched_s(watch, 50 * (layer + 1), start_s=50 * layer) is None
        runner.report()
    assert reader.expected_s == 3.0
    assert watched_s(watch, 2200, start_s=2000) is not None


def test_a_first_step_of_a_runner_that_reports_nothing_may_take_as_long_as_the_start(
    ends: tuple[SharedProgress, SharedProgress],
) -> None:
    writer, reader = ends
    hook = ProgressHook(writer, 30.0)
    hook.listen_to(object())
    hook.on_scheduled(FIRST_STEP)
    assert reader.expected_s == 30.0


def test_a_step_that_should_take_long_may_take_twenty_times_as_long(
    ends: tuple[SharedProgress, SharedProgress],
) -> None:
    writer, reader = ends
    watch = HangWatch(reader, 60.0)
    writer.advance(10.0)
    assert watched_s(watch, 1000) == SLOWDOWN * 10.0 + 1


def test_a_frozen_machine_is_no_hang(ends: tuple[SharedProgress, SharedProgress]) -> None:
    writer, reader = ends
    watch = HangWatch(reader, 60.0)
    writer.advance()
    assert not watch.look(0.0)
    assert not watch.look(3600.0)
    writer.advance()
    assert not watch.look(3601.0)


def test_without_a_limit_nothing_is_a_hang(ends: tuple[SharedProgress, SharedProgress]) -> None:
    writer, reader = ends
    writer.advance()
    assert watched_s(HangWatch(reader, 0.0), 1000) is None


def test_step_times_follow_their_size_and_fall_slowly() -> None:
    times = StepTimes(unknown_s=30.0)
    assert times.expected_s(512) == 30.0
    times.note(512, 4.0)
    assert times.expected_s(600) == 4.0
    assert times.expected_s(1) == 4.0
    assert times.expected_s(2048) == 30.0
    times.note(512, 1.0)
    assert 3.0 < times.expected_s(512) < 4.0
    times.note(1, 0.1)
    assert times.expected_s(1) == 0.1


def test_only_steps_with_tokens_are_progress(ends: tuple[SharedProgress, SharedProgress]) -> None:
    writer, reader = ends
    hook = ProgressHook(writer, unknown_s=30.0)
    hook.on_scheduled(SchedulerOutput(0))
    assert reader.count == 0
    rows = [ScheduledRequest("r", 0, 3, [])]
    hook.on_scheduled(SchedulerOutput(1, [], rows, [], 3))
    assert (reader.count, reader.expected_s) == (1, 30.0)
    hook.on_step(StepRecord(0.0, StepPhases(0.0, 2.0, 0.0), SchedulerStats(), rows), EngineCoreOutputs([]))
    assert (reader.count, reader.expected_s) == (2, 0.0)
    hook.on_scheduled(SchedulerOutput(2, [], rows, [], 3))
    assert reader.expected_s == 2.0
    hook.on_scheduled(SchedulerOutput(3, encoder_work=[EncoderWork(1, 4, 2)]))  # a large picture takes many such steps
    assert reader.count == 4
