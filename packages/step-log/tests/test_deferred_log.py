"""The thread that writes a step log: the same bytes, its errors in the steps, and a bound on what waits."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_core_scheduler import SchedulerConfig
from llmstack_step_log import (
    DeferredLog,
    FileSink,
    LoggedScheduler,
    LogHeader,
    RecordedRun,
    RingSink,
    StepLog,
    deferred_log,
    make_marker,
    read_step_log,
)
from llmstack_step_log.control_plane import CacheConfig, build_scheduler
from llmstack_step_log.records import Checkpoint, StepScheduled, StepUpdated
from llmstack_step_log.replay import verify
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_step_log.seek import LogFile, last_steps
from llmstack_step_log.step_log import STEPS_PER_CHECKPOINT
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams

LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
CACHE = CacheConfig(12, 4)
HEADER = LogHeader.of(LIMITS, CACHE, {})


class DiskError(Exception):
    """What a sink raises."""


class HeldSink(RingSink):
    """Takes no segment before `is_released` is set; raises `error`, if there is one. Sets `is_held` when it waits."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(1 << 20)
        self.is_held = threading.Event()
        self.is_released = threading.Event()
        self._error = error

    def write(self, segment: bytes, checkpoint: Checkpoint) -> None:
        if checkpoint.num_steps:
            self.is_held.set()
            self.is_released.wait(60)
            if self._error is not None:
                raise self._error
        super().write(segment, checkpoint)


def run(log: StepLog | DeferredLog, seed: int, num_steps: int = 150) -> None:
    """Arrivals and aborts from one seed; the model runner goes on with lists that it is given, as the real one does."""
    rng = random.Random(seed)
    scheduler = LoggedScheduler(build_scheduler(LIMITS, CACHE), log)
    adopted: dict[str, list[int]] = {}
    for step in range(num_steps):
        if rng.random() < 0.4:
            params = SamplingParams(max_tokens=rng.randint(1, 9), seed=0, ignore_eos=True)
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            scheduler.add_request(EngineCoreRequest(f"r{step}", prompt, params))
        if rng.random() < 0.1:
            scheduler.abort_requests([f"r{rng.randrange(step + 1)}"])
        scheduled = scheduler.schedule(float(step))
        adopted |= {request.request_id: request.token_ids for request in scheduled.new_requests}
        sampled = []
        for row in scheduled.scheduled_requests:
            known = adopted[row.request_id]
            is_last = row.num_computed_tokens + row.num_scheduled_tokens == len(known)
            sampled.append([rng.randrange(5)] if is_last else [])
            known += sampled[-1]
        output = ModelRunnerOutput([row.request_id for row in scheduled.scheduled_requests], sampled)
        scheduler.update_from_output(scheduled, output, step + 0.5)
        if rng.random() < 0.05:
            log.flush()


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_it_writes_the_same_bytes(seed: int) -> None:
    sinks = RingSink(1 << 20), RingSink(1 << 20)
    logs = StepLog(HEADER, sinks[0]), DeferredLog(StepLog(HEADER, sinks[1]))
    for log in logs:
        run(log, seed)
        log.close()
        log.close()
    assert sinks[0].dump() == sinks[1].dump()
    verify(RecordedRun(sinks[1].dump()))


def test_the_thread_lets_go_of_the_interpreter_within_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(deferred_log, "MAX_HOLD_S", -1.0)
    monkeypatch.setattr(deferred_log, "sleep", pauses.append)
    log = DeferredLog(StepLog(HEADER, RingSink(1 << 20)))
    for number in range(deferred_log.STEPS_PER_BATCH - 1):
        log.decide(b"%d" % number)
    log.flush()
    log.close()
    assert pauses == [deferred_log.PAUSE_S] * deferred_log.STEPS_PER_BATCH


def test_its_snapshots_are_of_the_step_that_they_name(tmp_path: Path) -> None:
    path = str(tmp_path / "run.steps")
    header = LogHeader.of(LIMITS, CACHE, {}, make_marker())
    log = DeferredLog(StepLog(header, FileSink(path), snapshot_steps=64))
    run(log, seed=1, num_steps=400)
    log.close()
    data = Path(path).read_bytes()
    assert data.count(header.marker) > 6  # one in the header, and a mark before each of 6 snapshots
    assert verify(read_step_log(path)).num_steps == 400  # compares the state with that of each snapshot


def test_a_log_in_memory_without_its_beginning_is_replayed_from_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "last.steps"
    header = LogHeader.of(LIMITS, CACHE, {}, make_marker())
    sink = RingSink(60_000)
    log = DeferredLog(StepLog(header, sink, snapshot_steps=64))
    run(log, seed=5, num_steps=2000)
    path.write_bytes(log.dump())
    num_dropped_steps = sink.num_dropped_steps
    log.close()  # may write one more snapshot, at the cost of more steps
    assert num_dropped_steps > 500
    assert sink.num_bytes <= 60_000
    with closing(LogFile(path)) as file:
        part = file.part_from(file.snapshot_steps[0])
        assert part.start is not None
        assert part.start.place.num_steps >= num_dropped_steps
        assert verify(part).num_steps == 2000
        first = file.part_from(0).start
        assert first is not None
        assert first.place.num_steps == file.snapshot_steps[0]
    with last_steps(path, 1000) as last:
        assert 100 < sum(isinstance(event, StepScheduled) for event in last.events()) < 1000
        assert verify(last).num_steps == 2000


def test_a_snapshot_that_leaves_no_room_for_steps_is_left_out() -> None:
    sink = RingSink(2000)
    log = DeferredLog(StepLog(LogHeader.of(LIMITS, CACHE, {}, make_marker()), sink, snapshot_steps=64))
    run(log, seed=6, num_steps=1000)
    data = log.dump()
    log.close()
    assert RecordedRun(data).last.num_steps == 1000
    assert 0 < sink.num_bytes <= 2000


def test_what_is_flushed_reaches_the_sink() -> None:
    sink = RingSink(1 << 20)
    log = DeferredLog(StepLog(HEADER, sink))
    run(log, seed=2, num_steps=3)
    log.flush()
    log.wait()
    assert RecordedRun(sink.dump()).last.num_steps == 3
    log.close()


class CheckedSink(RingSink):
    """Says when it has a checkpoint at `num_steps`."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(1 << 20)
        self.is_reached = threading.Event()
        self._num_steps = num_steps

    def write(self, segment: bytes, checkpoint: Checkpoint) -> None:
        super().write(segment, checkpoint)
        if checkpoint.num_steps == self._num_steps:
            self.is_reached.set()


def test_a_killed_process_loses_no_step_before_the_last_checkpoint() -> None:
    """Batches are larger than a step, but none withholds a checkpoint until later steps come."""
    sink = CheckedSink(STEPS_PER_CHECKPOINT)
    log = DeferredLog(StepLog(HEADER, sink))
    scheduler = LoggedScheduler(build_scheduler(LIMITS, CACHE), log)
    for step in range(STEPS_PER_CHECKPOINT + 1):  # with the first step of the next segment, the one before is proven
        scheduled = scheduler.schedule(float(step))
        scheduler.update_from_output(scheduled, ModelRunnerOutput([], []), step + 0.5)
    assert sink.is_reached.wait(60)
    assert RecordedRun(sink.dump()).last.num_steps == STEPS_PER_CHECKPOINT
    log.close()


class FailingScheduler:
    """Fails in one method, and is the scheduler that it has in all others."""

    def __init__(self, scheduler: Scheduler, method: str) -> None:
        self._scheduler = scheduler
        self._method = method

    def __getattr__(self, name: str) -> Any:
        def fail(*arguments: object) -> None:
            raise DiskError(name)

        return fail if name == self._method else getattr(self._scheduler, name)


@pytest.mark.parametrize("method", ["schedule", "update_from_output"])
@pytest.mark.parametrize("is_deferred", [False, True])
def test_the_log_of_a_crash_ends_with_the_call_that_failed(method: str, is_deferred: bool) -> None:
    sink = RingSink(1 << 20)
    log = DeferredLog(StepLog(HEADER, sink)) if is_deferred else StepLog(HEADER, sink)
    scheduler = LoggedScheduler(cast("Scheduler", FailingScheduler(build_scheduler(LIMITS, CACHE), method)), log)
    scheduler.add_request(EngineCoreRequest("a", [1, 2], SamplingParams(max_tokens=2, seed=0)))
    with pytest.raises(DiskError, match=method):
        scheduler.update_from_output(scheduler.schedule(1.0), ModelRunnerOutput(["a"], [[3]]), 2.0)
    log.close()
    events = [event for event in RecordedRun(sink.dump()).events() if not isinstance(event, Checkpoint)]
    expected = {"schedule": StepScheduled(1_000_000), "update_from_output": StepUpdated(2_000_000, 0, [[3]], {})}
    assert events[-1] == expected[method]


def test_an_error_of_the_thread_is_raised_in_the_steps() -> None:
    sink = HeldSink(DiskError("no space"))
    sink.is_released.set()
    log = DeferredLog(StepLog(HEADER, sink))
    with pytest.raises(DiskError, match="no space"):
        run(log, seed=3, num_steps=10_000)
    with pytest.raises(DiskError, match="no space"):
        log.wait()
    with pytest.raises(DiskError, match="no space"):
        log.close()
    log.close()


def test_steps_wait_for_a_thread_that_is_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_log, "MAX_WAITING_BATCHES", 4)
    sink = HeldSink()
    log = DeferredLog(StepLog(HEADER, sink))
    steps = threading.Thread(target=run, args=(log, 4, 2000))
    steps.start()
    assert sink.is_held.wait(60)
    steps.join(2)  # 2,000 steps take a fraction of it where none waits
    assert steps.is_alive()
    assert log.num_waiting_batches <= 4 + 2  # the last one, and what says that it is done
    sink.is_released.set()
    steps.join()
    log.close()
    assert verify(RecordedRun(sink.dump())).num_steps == 2000
