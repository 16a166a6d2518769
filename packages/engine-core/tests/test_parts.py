"""Outputs of a step are sent in several frames where one is too small for them."""

from __future__ import annotations

import pytest
from engine_core_helpers.messages import decode_engine_message, encode

from llmstack_engine_core.messages.message_set import FrameTooLargeError
from llmstack_engine_core.messages.protocol import ENGINE_MESSAGES, EngineFailed, encode_in_parts
from llmstack_types import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats


@pytest.fixture(autouse=True)
def _small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINE_MESSAGES, "max_bytes", 400)


def outputs(count: int, num_bytes: int) -> EngineCoreOutputs:
    rows = [
        EngineCoreOutput(f"p{index}", [], finish_reason=FinishReason.STOP, pooled=bytes(num_bytes))
        for index in range(count)
    ]
    return EngineCoreOutputs(rows, 5.0, SchedulerStats(step=3), engine_index=0)


@pytest.mark.parametrize(("count", "num_frames"), [(1, 1), (2, 2), (3, 3), (8, 8)])
def test_the_requests_of_a_step_are_shared_out_over_frames(count: int, num_frames: int) -> None:
    frames = encode_in_parts(outputs(count, 200))
    found = [decode_engine_message(frame) for frame in frames]
    assert len(found) == num_frames
    assert all(isinstance(message, EngineCoreOutputs) and message.timestamp_s == 5.0 for message in found)
    rows = [row for message in found if isinstance(message, EngineCoreOutputs) for row in message.outputs]
    assert rows == outputs(count, 200).outputs
    stats = [message.scheduler_stats for message in found if isinstance(message, EngineCoreOutputs)]
    assert stats == [SchedulerStats(step=3)] + [None] * (num_frames - 1)


def test_what_fits_goes_in_one() -> None:
    assert encode_in_parts(outputs(3, 20)) == [encode(outputs(3, 20))]


def test_one_request_or_another_message_that_is_too_large_is_refused() -> None:
    for message in (outputs(1, 500), EngineFailed("x" * 500)):
        with pytest.raises(FrameTooLargeError):
            encode_in_parts(message)


def test_a_frame_that_is_too_large_is_an_error_of_its_own() -> None:
    with pytest.raises(FrameTooLargeError, match="too large; 400 is the limit"):
        encode(EngineFailed("x" * 500))
