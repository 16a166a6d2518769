"""Messages of the engine core that may be too large for one frame."""

from __future__ import annotations

from llmstack_engine_core.ipc.codec import FrameTooLargeError, encode
from llmstack_engine_core.ipc.frames import EngineMessage
from llmstack_types import EngineCoreOutputs


def encode_in_parts(message: EngineMessage, epoch: int = 0) -> list[bytes]:
    """The frames of a message of this epoch: one, or several for a step with many vectors.

    What belongs to no single request, such as statistics, goes with the first.

    Raises:
        FrameTooLargeError: The output of one request is too large.
        CodecError: A field is outside what the protocol can carry.
    """
    try:
        return [encode(message, epoch)]
    except FrameTooLargeError:
        if not isinstance(message, EngineCoreOutputs) or len(message.outputs) < 2:
            raise
    half = len(message.outputs) // 2
    first = message._replace(outputs=message.outputs[:half])
    rest = EngineCoreOutputs(message.outputs[half:], message.timestamp_s, engine_index=message.engine_index)
    return [*encode_in_parts(first, epoch), *encode_in_parts(rest, epoch)]
