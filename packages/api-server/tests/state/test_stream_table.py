"""Answers that outlive their connections stay within their limits."""

from __future__ import annotations

import asyncio
import random

import pytest

from llmstack_server.state import stream_table
from llmstack_server.state.packed_parts import (
    MAX_FRESH_BYTES,
    MAX_PACKED_PART,
    MIN_PACKED_BYTES,
    NUM_BLOCK_PARTS,
    PART_OVERHEAD,
    PackedParts,
)
from llmstack_server.state.stream_record import MAX_STREAM_BYTES, Head, ReplacedError, StreamRecord, UnknownStreamError
from llmstack_server.state.stream_table import MAX_PER_OWNER, RECORD_OVERHEAD, StreamTable

STREAM = Head(200, (), is_stream=True)


def new_record(table: StreamTable, owner: str = "a", keep_s: float = 60.0, key: str | None = None) -> StreamRecord:
    record = table.add(owner, "digest", keep_s, key)
    assert record is not None
    record.begin(STREAM)
    return record


def finish(record: StreamRecord) -> None:
    """Ends a record without a reader."""
    record.open(0).close()
    record.finish()


async def test_a_full_key_gives_up_its_oldest_finished_answer_and_no_other_keys():
    table = StreamTable()
    other = new_record(table, "b")
    finish(other)
    records = [new_record(table) for _ in range(MAX_PER_OWNER)]
    assert table.add("a", "digest", 60.0) is None
    finish(records[5])
    finish(records[2])
    assert table.add("a", "digest", 60.0) is not None
    assert table.get(records[5].id, "a") is None
    assert table.get(records[2].id, "a") is records[2]
    assert table.get(other.id, "b") is other


async def test_all_keys_together_give_up_the_oldest_finished_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream_table, "MAX_BYTES", 3 * RECORD_OVERHEAD + 1000)
    table = StreamTable()
    first, second, third = (new_record(table, owner) for owner in "abc")
    assert table.add("d", "digest", 60.0) is None
    finish(second)
    finish(first)
    await third.append(b"x" * 1001)
    assert table.get(second.id, "b") is None
    assert table.get(first.id, "a") is first
    reader = third.open(0)
    await third.append(b"x" * 3 * RECORD_OVERHEAD)  # without another finished one it gives up itself
    assert table.get(first.id, "a") is None
    assert table.get(third.id, "c") is None
    assert not third.abandoned.is_set()
    reader.close()
    assert third.abandoned.is_set()
    assert (len(table), table.num_bytes) == (0, 0)


async def test_a_large_answer_reaches_its_reader_but_no_later_one():
    given_up = 0

    def count() -> None:
        nonlocal given_up
        given_up += 1

    table = StreamTable(on_abandoned=count)
    record = new_record(table, key="key")
    reader = record.open(0)
    drawn = random.Random(7)

    async def generate() -> None:
        for _ in range(8):
            await record.append(drawn.randbytes(MAX_STREAM_BYTES // 2))  # with nothing in common
        record.finish()

    generating = asyncio.create_task(generate())
    num_parts, is_last = 0, False
    while not is_last:
        batch = await reader.read()
        num_parts, is_last = num_parts + len(batch.parts), batch.is_last
        assert record.num_bytes <= 2 * MAX_STREAM_BYTES
    await generating
    assert num_parts == 8
    assert not batch.is_resumable
    assert table.get(record.id, "a") is None
    assert table.with_key("key") is None
    reader.close()
    assert given_up == 0

    unread = new_record(table)
    unread.open(0).close()
    await unread.append(b"x" * MAX_STREAM_BYTES)
    assert unread.abandoned.is_set()
    assert given_up == 1


async def test_an_answer_without_a_reader_is_given_up_after_its_time_and_one_with_a_reader_is_not():
    table = StreamTable()
    unread, read = new_record(table, keep_s=0.01), new_record(table, keep_s=0.01)
    read.open(0)
    unread.open(0).close()
    await asyncio.wait_for(unread.abandoned.wait(), 30)
    assert len(table) == 1
    reader = read.open(0)
    reader.close()  # the first one still reads
    assert not read.abandoned.is_set()


async def test_a_later_reader_takes_a_stream_over():
    record = new_record(StreamTable())
    await record.append(b"one")
    await record.append(b"two")
    first = record.open(0)
    assert (await first.read()).parts == [b"one", b"two"]
    waiting = asyncio.create_task(first.read())
    await asyncio.sleep(0)
    second = record.open(1)
    with pytest.raises(ReplacedError):
        await waiting
    batch = await second.read()
    assert (batch.first, batch.parts, batch.is_last) == (2, [b"two"], False)
    with pytest.raises(UnknownStreamError):
        record.open(3)


async def test_an_id_leads_to_its_process_and_to_its_owner_alone():
    for index in range(3):
        table = StreamTable(index, 3)
        record = new_record(table)
        assert int(record.id, 16) % 3 == index
        assert table.get(record.id, "a") is record
        assert table.get(record.id, "b") is None


def test_packed_parts_are_what_was_appended():
    drawn = random.Random(7)
    head, tail = b'data: {"id":"chatcmpl-1","model":"m","choices":[{"index":0,' + b" " * 40, b"}]}\n\n"
    for _ in range(50):
        parts = PackedParts()
        texts = [b"first", *(drawn.randbytes(drawn.randrange(6)) for _ in range(3 * NUM_BLOCK_PARTS)), b"[DONE]"]
        expected = [head + text + tail if drawn.random() < 0.8 else text + b"\n\n" for text in texts]
        for part in expected:
            parts.append(part)
            if drawn.random() < 0.01:
                parts.pack()
        for _ in range(2):
            assert parts.after(0, 1 << 20) == expected
            start = drawn.randrange(len(expected))
            assert parts.after(start, 1) == expected[start : start + 1]
            parts.pack()
        for start in sorted(drawn.randrange(len(expected)) for _ in range(5)):
            parts.drop(start)
            assert (len(parts), parts.after(start, 1 << 20)) == (len(expected), expected[start:])
            assert start - NUM_BLOCK_PARTS <= parts.num_dropped <= start
        parts.append(b"one more")
        parts.drop(len(expected) + 1)
        assert (len(parts), parts.num_dropped, parts.num_bytes) == (len(expected) + 1, len(expected) + 1, 0)


def test_long_parts_are_not_packed():
    parts = PackedParts()
    parts.append(b"x" * 2 * MAX_PACKED_PART)
    parts.pack()
    assert parts.num_bytes == 2 * MAX_PACKED_PART + PART_OVERHEAD
    assert parts.after(0, 1) == [b"x" * 2 * MAX_PACKED_PART]


def test_events_of_the_same_form_cost_little_more_than_their_text():
    parts = PackedParts()
    for number in range(100):
        parts.append(b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","text":"%d"}\n\n' % number)
    parts.pack()
    assert parts.num_bytes < 100 * (PART_OVERHEAD + 8) + 200


async def test_an_answer_is_packed_before_it_is_too_large_to_be_kept():
    table = StreamTable()
    record = new_record(table)
    expected = [b'data: {"id":"chatcmpl-1","choices":[{"text":"%d"}]}%b\n\n' % (n, b" " * 300) for n in range(10_000)]
    for event in expected:
        await record.append(event)
    assert sum(map(len, expected)) > 3 * MAX_STREAM_BYTES
    assert record.is_resumable
    assert table.get(record.id, "a") is record
    assert table.num_bytes <= MAX_STREAM_BYTES + RECORD_OVERHEAD
    record.finish()
    reader, found = record.open(0), list[bytes]()
    while not (batch := await reader.read()).is_last:
        found += batch.parts
    assert found + batch.parts == expected


async def test_running_answers_are_packed_before_a_finished_one_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream_table, "MAX_BYTES", 4 * RECORD_OVERHEAD + 2 * MIN_PACKED_BYTES)
    table = StreamTable()
    finished, *running = (new_record(table, owner) for owner in "abc")
    finish(finished)
    event = b'data: {"id":"chatcmpl-1","choices":[{"text":"x"}]}' + b" " * 300 + b"\n\n"
    for _ in range(100):
        for record in running:
            await record.append(event)
    assert table.num_bytes <= 4 * RECORD_OVERHEAD + 2 * MIN_PACKED_BYTES
    assert [table.get(record.id, record.owner) for record in (finished, *running)] == [finished, *running]
    assert table.add("d", "digest", 60.0) is not None
    assert table.get(finished.id, "a") is finished


async def test_a_reader_that_waits_takes_a_part_where_it_is_appended():
    record = new_record(StreamTable())
    reader = record.open(0)
    taken: list[tuple[int, bytes]] = []
    is_free = True

    def take(number: int, part: bytes) -> bool:
        if is_free:
            taken.append((number, part))
        return is_free

    reader.follow(take)
    await record.append(b"before it waits")
    assert (await reader.read()).parts == [b"before it waits"]
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    for part in (b"second", b"third"):
        await record.append(part)
    assert taken == [(2, b"second"), (3, b"third")]
    is_free = False
    await record.append(b"fourth")
    is_free = True
    await record.append(b"fifth")  # not before the fourth
    batch = await reading
    assert (batch.first, batch.parts) == (4, [b"fourth", b"fifth"])
    assert len(taken) == 2
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    record.finish()
    assert (await reading).is_last
    assert record.open(0).position == 0  # later readers get all


async def test_a_reader_that_waits_takes_a_part_once_it_is_on_the_disk():
    record = new_record(StreamTable())
    record.hold()
    record.put(b"first")
    reader = record.open(0)
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    assert not reading.done()
    record.reveal(1)
    assert (await reading).parts == [b"first"]

    taken: list[tuple[int, bytes]] = []
    has_room = True

    def take(number: int, part: bytes) -> bool:
        if has_room:
            taken.append((number, part))
        return has_room

    reader.follow(take)
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    for part in (b"second", b"third", b"fourth"):
        record.put(part)
    assert not taken
    record.reveal(3)
    assert taken == [(2, b"second"), (3, b"third")]
    has_room = False
    record.reveal(4)
    batch = await reading
    assert (batch.first, batch.parts, batch.is_last) == (4, [b"fourth"], False)
    has_room = True
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    record.put(b"last", is_last=True)
    record.finish()
    record.reveal(5)
    batch = await reading
    assert (batch.first, batch.parts, batch.is_last, len(taken)) == (5, [b"last"], True, 2)


async def test_the_last_part_is_read_together_with_the_end():
    record = new_record(StreamTable())
    reader = record.open(0)

    def take(number: int, part: bytes) -> bool:
        raise AssertionError("the end would take a second write")

    reader.follow(take)
    await record.append(b"first")
    await reader.read()
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    record.put(b"last", is_last=True)
    record.finish()
    batch = await reading
    assert (batch.parts, batch.is_last) == ([b"last"], True)


async def test_a_reader_of_what_is_not_kept_makes_room_by_itself():
    table = StreamTable()
    record = new_record(table)
    reader = record.open(0)

    def take(number: int, part: bytes) -> bool:
        raise AssertionError("parts are dropped as they are read")

    reader.follow(take)
    assert not (await reader.read()).parts
    table.remove(record)
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    await record.append(b"x")
    assert (await reading).parts == [b"x"]


async def test_what_a_reader_has_read_by_itself_counts_too():
    table = StreamTable()
    record = new_record(table)
    reader = record.open(0)
    drawn = random.Random(3)
    for _ in range(100):
        record.put(drawn.randbytes(MAX_FRESH_BYTES // 10))
        await reader.read()
    assert table.num_bytes > 90 * MAX_FRESH_BYTES // 10


async def test_events_count_before_they_are_more_than_their_record_is_counted_for():
    table = StreamTable()
    record = new_record(table)
    drawn, num_kept_bytes = random.Random(5), 0
    for _ in range(1000):
        size = drawn.choice([50, 200, 500, 600])
        record.put(drawn.randbytes(size))
        num_kept_bytes += size + PART_OVERHEAD
        counted = table.num_bytes
        assert num_kept_bytes <= counted
        assert record.num_bytes <= counted
        assert counted <= record.num_bytes + RECORD_OVERHEAD
