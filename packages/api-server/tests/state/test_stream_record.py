"""Several readers of one record whose parts are kept on a disk."""

from __future__ import annotations

import asyncio

import pytest

from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.stream_record import Head, StreamRecord, UnknownStreamError


async def test_a_reader_ahead_of_the_disk_does_not_keep_the_others_waiting() -> None:
    record = StreamRecord("resp_1", "owner")
    record.restore(Head(200, (), is_stream=False), ())
    record.hold()
    for number in range(5):
        record.put(b"%d" % number)
    record.reveal(3)
    behind, ahead = record.open(0), record.open(5)
    assert (await behind.read()).parts == [b"0", b"1", b"2"]
    assert (await ahead.read()).parts == []
    waiting = [asyncio.ensure_future(reader.read()) for reader in (behind, ahead)]
    await asyncio.sleep(0)
    record.reveal(5)
    await asyncio.sleep(0)
    assert waiting[0].done()
    assert waiting[0].result().parts == [b"3", b"4"]
    waiting[1].cancel()


async def test_a_reader_that_claims_more_than_there_was_gets_an_error_at_the_end() -> None:
    record = StreamRecord("a", "owner")
    record.restore(Head(200, (), is_stream=True), (), num_promised=2)
    reader = record.open(9)  # an earlier server may have sent more than the disk has
    reading = asyncio.ensure_future(reader.read_from(9, knows_head=True))
    await asyncio.sleep(0)
    for number in range(5):
        record.put(b"%d" % number)
    record.finish()
    with pytest.raises(UnknownStreamError):
        await reading
    assert (await record.open(4).read()).parts == [b"4"]
    with pytest.raises(UnknownStreamError):
        record.open(6)


async def test_the_first_event_waits_for_the_head_of_its_stream() -> None:
    source = AnswerSource(["id"])
    source.is_repeatable = True
    record = StreamRecord("a", "owner")
    record.hold(source)
    source.note_written(1, 0)
    record.reveal(0)  # the row has all values, and no head yet
    record.begin(Head(200, (), is_stream=True))
    record.put(b"0")
    assert record.num_visible == 0
    source.note_written(1, 0)
    record.reveal(0)  # it was on its way before the head
    assert record.num_visible == 0
    record.reveal(1)
    record.put(b"1")
    assert record.num_visible == 2
