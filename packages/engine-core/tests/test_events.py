"""What hooks and the front end receive, and what the recorder keeps."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from llmstack_engine_core import EngineConfig, EngineCore, EventHook, build_engine_core
from llmstack_engine_core.events import EventBus, StepRecorder
from llmstack_types import (
    Control,
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerConfig,
    RequestEvent,
    RequestStatus,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerStats,
    StepPhases,
    StepRecord,
)


class Diary(EventHook):
    """Writes everything down."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[StepRecord] = []

    def on_status(self, event: RequestEvent) -> None:
        self.lines.append(f"{event.request_id} {event.status.name}")

    def on_scheduled(self, scheduled: SchedulerOutput) -> None:
        self.lines.append(f"step {scheduled.step} of {len(scheduled.scheduled_requests)}")

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        num_tokens = sum(len(output.new_token_ids) for output in outputs.outputs)
        self.lines.append(f"done {record.stats.step} with {num_tokens}")
        self.records.append(record)


class Broken(EventHook):
    """Fails whenever it is called."""

    def on_status(self, event: RequestEvent) -> None:
        raise RuntimeError("a bug of the user's")


def client(*hooks: EventHook, **options: object) -> EngineCore:
    config = EngineConfig(ModelRunnerConfig("echo"), runner="echo", num_blocks=64, **options)  # type: ignore[arg-type]
    return build_engine_core(config, hooks)


def run(engine: EngineCore, request_id: str = "r", num_tokens: int = 2) -> list[EngineCoreOutputs]:
    engine.add_request(EngineCoreRequest(request_id, [1, 2, 3], SamplingParams(max_tokens=num_tokens, seed=0)))
    steps = []
    while not any(output.finish_reason for step in steps for output in step.outputs):
        steps.append(engine.step())
    return steps


def record(step: int, num_rows: int = 1) -> StepRecord:
    rows = [ScheduledRequest(f"r{index}", 0, 1, []) for index in range(num_rows)]
    return StepRecord(float(step), StepPhases(0, 0, 0), SchedulerStats(step), rows)


def test_a_hook_receives_states_and_steps_in_the_order_they_happen() -> None:
    diary = Diary()
    run(client(diary))
    assert diary.lines == [
        "r WAITING",
        "r RUNNING",
        "step 1 of 1",
        "done 1 with 1",
        "step 2 of 1",
        "r FINISHED_LENGTH_CAPPED",
        "done 2 with 1",
    ]


def test_a_step_is_recorded_with_its_batch_blocks_and_phases() -> None:
    diary = Diary()
    run(client(diary))
    first, second = diary.records
    assert [(row.request_id, row.num_computed_tokens, row.num_scheduled_tokens) for row in first.rows] == [("r", 0, 3)]
    assert len(first.rows[0].new_block_ids) == 1
    assert (first.stats.num_blocks, first.stats.num_free_blocks, first.stats.num_running) == (64, 63, 1)
    assert (second.stats.num_free_blocks, second.stats.num_running) == (64, 0)
    assert min(first.phases) >= 0
    assert first.start_s + sum(first.phases) <= second.start_s


def test_a_hook_that_fails_is_logged_and_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    diary = Diary()
    with caplog.at_level(logging.ERROR):
        run(client(Broken(), diary))
    assert "an event hook failed" in caplog.text
    assert diary.lines[0] == "r WAITING"


def test_the_front_end_receives_states_that_no_output_implies() -> None:
    first, *others = run(client())
    assert [(event.request_id, event.status) for event in first.events] == [
        ("r", RequestStatus.WAITING),
        ("r", RequestStatus.RUNNING),
    ]
    assert [event.time_s for event in first.events] == sorted(event.time_s for event in first.events)
    assert not any(step.events for step in others)
    assert all(step.phases is not None for step in (first, *others))


def test_outputs_carry_no_events_where_statistics_are_off() -> None:
    diary = Diary()
    steps = run(client(diary, log_stats=False))
    assert not any(step.events or step.phases or step.scheduler_stats for step in steps)
    assert len(diary.records) == 2  # hooks receive them all the same


def test_the_recorder_is_read_step_by_step() -> None:
    engine = client()
    run(engine)
    whole = engine.call(Control.RECENT_STEPS, 0)
    assert [step.stats.step for step in whole.steps] == [1, 2]
    assert [event.status.name for event in whole.events] == ["WAITING", "RUNNING", "FINISHED_LENGTH_CAPPED"]
    assert [step.stats.step for step in engine.call(Control.RECENT_STEPS, 1).steps] == [2]
    assert whole.now_s >= whole.steps[-1].start_s


def test_nothing_is_recorded_where_that_is_off() -> None:
    engine = client(num_recorded_steps=0)
    run(engine)
    assert not engine.call(Control.RECENT_STEPS, 0).steps


def test_the_recorder_is_bounded_by_steps_rows_and_events() -> None:
    recorder = StepRecorder(max_steps=3, max_rows=10, max_events=2)
    for step in range(1, 6):
        recorder.on_step(record(step), EngineCoreOutputs([]))
        recorder.on_status(RequestEvent("r", RequestStatus.WAITING, float(step)))
    assert [kept.stats.step for kept in recorder.read(0.0).steps] == [3, 4, 5]
    assert [event.time_s for event in recorder.read(0.0).events] == [4.0, 5.0]
    recorder.on_step(record(6, num_rows=9), EngineCoreOutputs([]))
    assert [kept.stats.step for kept in recorder.read(0.0).steps] == [5, 6]
    recorder.on_step(record(7, num_rows=50), EngineCoreOutputs([]))
    assert [kept.stats.step for kept in recorder.read(0.0).steps] == [7]


def test_a_hook_is_called_for_the_events_that_it_overrides_only() -> None:
    bus = EventBus((StepRecorder(), Broken(), Diary()), clock=lambda: 0.0)
    assert len(bus.scheduled_hooks) == 1
    assert len(bus.step_hooks) == 2


def test_a_hook_may_be_any_class_with_one_of_the_methods() -> None:
    class Counter:
        count = 0

        def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
            self.count += 1

    counter = Counter()
    bus = EventBus((counter,), clock=lambda: 0.0)  # type: ignore[arg-type]  # what a script may pass
    bus.on_status("r", RequestStatus.WAITING)
    bus.on_step(record(1), EngineCoreOutputs([]))
    assert counter.count == 1


def test_events_are_taken_once() -> None:
    bus = EventBus((), clock=lambda: 1.5)
    bus.on_status("r", RequestStatus.WAITING)
    bus.on_status("r", RequestStatus.FINISHED_STOPPED)
    assert bus.take() == [RequestEvent("r", RequestStatus.WAITING, 1.5)]
    assert bus.take() == []


def test_a_trace_has_one_line_per_stage_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    run(client(trace=True), "cmpl-1", num_tokens=2)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[TRACE]")]
    shown = [line for line in lines if "done in" not in line]
    assert shown == [
        "[TRACE] (scheduler) cmpl-1: WAITING",
        "[TRACE] (scheduler) cmpl-1: RUNNING",
        "[TRACE] (scheduler) step 1: 3 tokens of 1 requests",
        "[TRACE] (model_runner) cmpl-1: prefill of tokens 0 to 3, 1 new blocks",
        "[TRACE] (engine_core) cmpl-1: 1 tokens",
        "[TRACE] (scheduler) step 2: 1 tokens of 1 requests",
        "[TRACE] (model_runner) cmpl-1: decode of tokens 3 to 4, 0 new blocks",
        "[TRACE] (scheduler) cmpl-1: FINISHED_LENGTH_CAPPED",
        "[TRACE] (engine_core) cmpl-1: 1 tokens, the end: length",
    ]
    assert len(lines) - len(shown) == 2


def test_at_level_debug_the_log_has_a_line_per_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "llmstack_engine_core"):
        run(client())
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("STEP")]
    assert lines == [
        "STEP 1: 1 requests scheduled, 3 tokens in the batch, 1 sampled, 0 finished, 1 running, 0 waiting",
        "STEP 2: 1 requests scheduled, 1 tokens in the batch, 1 sampled, 1 finished, 0 running, 0 waiting",
    ]


def test_without_a_trace_nothing_is_printed_and_its_module_is_not_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    run(client())
    assert "[TRACE]" not in capsys.readouterr().err
    script = (
        "import sys\nfrom llmstack_engine_core import EngineConfig, build_engine_core\n"
        "from llmstack_types import ModelRunnerConfig\n"
        "build_engine_core(EngineConfig(ModelRunnerConfig('echo'), runner='echo', num_blocks=8))\n"
        "print('llmstack_engine_core.trace' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "False"


def test_the_recorder_knows_the_tenants_of_what_it_keeps_within_a_bound() -> None:
    recorder = StepRecorder(max_steps=1, max_tenants=2)
    for name in ("a", "b", "c"):
        recorder.note_request(EngineCoreRequest(name, [1], SamplingParams(), tenant=f"tenant of {name}"))
        recorder.on_status(RequestEvent(name, RequestStatus.WAITING, 0.0))
    recorder.on_status(RequestEvent("c/beam-1", RequestStatus.RUNNING, 0.0))
    recorder.on_status(RequestEvent("unknown", RequestStatus.RUNNING, 0.0))
    tenants = {"b": "tenant of b", "c": "tenant of c", "c/beam-1": "tenant of c"}
    assert recorder.read(0.0).tenants == tenants
