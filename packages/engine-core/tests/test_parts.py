"""Outputs of a step are sent in several frames where one is too small for them."""

from __future__ import annotations

import pytest

from llmstack_engine_core.ipc import codec, parts
from llmstack_engine_core.ipc.codec import FrameTooLargeError, decode_engine_message, encode
from llmstack_engine_core.ipc.frames import EngineFailed
from llmstack_types import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats


@pytest.fixture(autouse=True)
def _small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode_small(message: object, epoch: int) -> bytes:
        frame = encode(message, epoch)  # type: ignore[arg-type]
        if len(frame) > 400:
            raise FrameTooLargeError("too large")
        return frame

    monkeypatch.setattr(parts, "encode", encode_small)


def outputs(count: int, num_bytes: int) -> EngineCoreOutputs:
    rows = [
        EngineCoreOutput(f"p{index}", [], finish_reason=FinishReason.STOP, pooled=bytes(num_bytes))
        for index in range(count)
    ]
    return EngineCoreOutputs(rows, 5.0, SchedulerStats(step=3), engine_index=0)


@pytest.mark.parametrize(("count", "num_frames"), [(1, 1), (2, 2), (3, 3), (8, 8)])
def test_the_requests_of_a_step_are_shared_out_over_frames(count: int, num_frames: int) -> None:
    frames = parts.encode_in_parts(outputs(count, 200))
    found = [decode_engine_message(frame) for frame in frames]
    assert len(found) == num_frames
    assert all(isinstance(message, EngineCoreOutputs) and message.timestamp_s == 5.0 for message in found)
    rows = [row for message in found if isinstance(message, EngineCoreOutputs) for row in message.outputs]
    assert rows == outputs(count, 200).outputs
    stats = [message.scheduler_stats for message in found if isinstance(message, EngineCoreOutputs)]
    assert stats == [SchedulerStats(step=3)] + [None] * (num_frames - 1)


def test_what_fits_goes_in_one() -> None:
    assert parts.encode_in_parts(outputs(3, 20)) == [encode(outputs(3, 20))]


def test_one_request_or_another_message_that_is_too_large_is_refused() -> None:
    for message in (outputs(1, 500), EngineFailed("x" * 500)):
        with pytest.raises(FrameTooLargeError):
            parts.encode_in_parts(message)


def test_the_codec_tells_a_frame_that_is_too_large_from_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    tag, encode_fields, _ = codec._ENCODERS[EngineFailed]
    monkeypatch.setitem(codec._ENCODERS, EngineFailed, (tag, encode_fields, 100))
    with pytest.raises(FrameTooLargeError, match="too large; 100 is the limit"):
        encode(EngineFailed("x" * 200))
