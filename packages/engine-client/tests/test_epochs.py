"""The epoch in each frame: a client takes nothing from another engine core than the one that answered it."""

from __future__ import annotations

import msgpack
import pytest
from engine_core_helpers.messages import encode

from llmstack_engine_client.clients.mailbox import Mailbox
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.messages.protocol import ENGINE_MESSAGES, EngineFailed, SleepChanged, encode_in_parts
from llmstack_types import EngineCoreOutput, EngineCoreOutputs, EngineReady

READY = EngineReady(64, 16, 128, 257, "float32", "cpu")
OUTPUTS = EngineCoreOutputs([EngineCoreOutput("r", [1, 2])], 1.0)


def test_frames_of_an_engine_core_that_was_given_up_are_not_taken() -> None:
    mailbox = Mailbox()
    mailbox.put(encode(READY, 7))
    for stale in (OUTPUTS, EngineFailed("gone"), SleepChanged(2), READY):
        mailbox.put(encode(stale, 6))
    assert (mailbox.num_stale, list(mailbox.outputs), mailbox.death, mailbox.sleep_level) == (4, [], None, 0)
    mailbox.put(encode(OUTPUTS, 7))
    assert [one.outputs for one in mailbox.outputs] == [OUTPUTS.outputs]


def test_every_frame_of_a_message_in_parts_has_the_epoch() -> None:
    assert [ENGINE_MESSAGES.decode(frame)[0] for frame in encode_in_parts(OUTPUTS, 5)] == [5]


@pytest.mark.parametrize("epoch", [-1, 2**32, "7", None, 1.0])
def test_an_epoch_is_a_number_of_32_bits(epoch: object) -> None:
    values = msgpack.unpackb(encode(SleepChanged(0)))
    values[2] = epoch
    with pytest.raises(CodecError, match="epoch"):
        ENGINE_MESSAGES.decode(msgpack.packb(values))
