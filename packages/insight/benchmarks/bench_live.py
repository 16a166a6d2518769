"""What a reader of `/live/events` takes in half a second: 256 running requests, 40 steps per second."""

from __future__ import annotations

import time
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it ships no types
import pytest

from llmstack_engine_core.events import StepRecorder
from llmstack_engine_core.messages.recent_steps import RECENT_STEPS
from llmstack_insight.timeline import timeline_of
from llmstack_types import EngineCoreOutputs, ScheduledRequest, SchedulerStats, StepPhases, StepRecord, StepRecording

NUM_ROWS, NUM_STEPS = 256, 20

pytestmark = pytest.mark.benchmark(group="half a second of a live page", timer=time.thread_time)


@pytest.fixture(scope="module")
def recorder() -> StepRecorder:
    """The steps of half a second; each row gets a block once in 16 steps."""
    made = StepRecorder()
    for step in range(1, NUM_STEPS + 1):
        rows = [
            ScheduledRequest(f"cmpl-{row:032d}-0", 100 + step, 1, [row] if (step + row) % 16 == 0 else [])
            for row in range(NUM_ROWS)
        ]
        stats = SchedulerStats(step, num_running=NUM_ROWS, num_free_blocks=5, num_blocks=8)
        made.on_step(StepRecord(step / 40, StepPhases(0.001, 0.02, 0.003), stats, rows), EngineCoreOutputs([]))
    return made


def sent(recorder: StepRecorder) -> bytes:
    """What the engine core's thread does for the reader."""
    frame: bytes = msgpack.packb(RECENT_STEPS.pack(recorder.read(2.0), "recording"))
    return frame


def shown(frame: bytes) -> dict[str, Any]:
    """What the API process does for it, without the encoding as JSON."""
    log: StepRecording = RECENT_STEPS.unpack(msgpack.unpackb(frame), "recording")
    return timeline_of(log)


def test_in_the_engine_core(benchmark: Any, recorder: StepRecorder) -> None:
    benchmark.pedantic(sent, args=(recorder,), rounds=50, warmup_rounds=5)


def test_in_the_api_process(benchmark: Any, recorder: StepRecorder) -> None:
    benchmark.pedantic(shown, args=(sent(recorder),), rounds=50, warmup_rounds=5)
