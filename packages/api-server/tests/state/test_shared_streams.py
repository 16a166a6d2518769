"""Several API processes: a key belongs to one answer, and each process reads each answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from llmstack_server.state import remote_streams, shared_streams
from llmstack_server.state.peers import Peers
from llmstack_server.state.remote_streams import Reader, RemoteReader
from llmstack_server.state.shared_streams import KeyReusedError, SharedStreams
from llmstack_server.state.stream_record import (
    FailedError,
    Head,
    ReplacedError,
    StreamAwayError,
    StreamRecord,
    UnknownStreamError,
)

STREAM = Head(200, ((b"content-type", b"text/event-stream"),), is_stream=True)
KEYS = [str(number) for number in range(6)]  # each process is the one that remembers some of them


@pytest.fixture
async def peers(tmp_path: Path) -> AsyncIterator[list[Peers]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Peers(tmp_path, index, 3)) for index in range(3)]


@pytest.fixture
def three(peers: list[Peers]) -> list[SharedStreams]:
    """The streams of each of three processes."""
    found = [SharedStreams() for _ in peers]
    for streams, peer in zip(found, peers, strict=True):
        streams.share(peer, lambda: None)
    return found


async def begin(streams: SharedStreams, key: str = "key") -> StreamRecord:
    record = await streams.claim(key, "digest", "owner", 60.0)
    assert isinstance(record, StreamRecord)
    record.begin(STREAM)
    return record


async def join(streams: SharedStreams, key: str = "key", digest: str = "digest") -> Reader:
    reader = await streams.claim(key, digest, "owner", 60.0)
    assert reader is not None
    assert not isinstance(reader, StreamRecord)
    return reader


async def read_all(reader: Reader) -> list[bytes]:
    parts: list[bytes] = []
    while True:
        batch = await reader.read()
        parts += batch.parts
        if batch.is_last:
            return parts


async def test_a_key_leads_to_its_answer_from_every_process(three: list[SharedStreams]):
    for number, key in enumerate(KEYS):
        record = await begin(three[number % 3], key)
        await record.append(key.encode())
        record.finish()
        for streams in three:
            assert await read_all(await join(streams, key)) == [key.encode()]
            with pytest.raises(KeyReusedError):
                await join(streams, key, "other")


async def test_of_claims_at_the_same_time_one_has_the_record(three: list[SharedStreams]):
    for key in KEYS:
        claims = [streams.claim(key, "digest", "owner", 60.0) for streams in three for _ in range(2)]
        found = await asyncio.gather(*claims)
        assert sum(isinstance(one, StreamRecord) for one in found) == 1
        assert all(found)
    assert sum(len(streams.table) for streams in three) == len(KEYS)


async def test_an_id_is_read_in_every_process_and_by_its_owner_alone(three: list[SharedStreams]):
    record = await begin(three[1])
    for part in (b"1", b"2", b"3"):
        await record.append(part)
    record.finish()
    for streams in three:
        reader = await streams.open(record.id, "owner", 1)
        batch = await reader.read()
        assert (batch.head, batch.first, batch.parts, batch.is_last) == (STREAM, 2, [b"2", b"3"], True)
        assert reader.stream_id == record.id
        for owner, after, digest in (("", 0, "-"), ("other", 0, "-"), ("owner", 4, "-"), ("owner", 0, "other")):
            with pytest.raises(UnknownStreamError):
                await streams.open(record.id, owner, after, digest)
        with pytest.raises(UnknownStreamError):
            await streams.open("x y", "owner", 0)


async def test_a_reader_of_another_process_waits_for_news_and_is_replaced(
    three: list[SharedStreams], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote_streams, "MAX_WAIT_S", 0.01)  # so it asks more than once
    record = await begin(three[0])
    first = await join(three[1])
    assert (await first.read()).parts == []  # the head alone
    reading = asyncio.create_task(first.read())
    await asyncio.sleep(0.03)
    await record.append(b"news")
    assert (await reading).parts == [b"news"]
    reading = asyncio.create_task(first.read())
    second = await join(three[2])
    with pytest.raises(ReplacedError):
        await reading
    record.finish()
    assert await read_all(second) == [b"news"]
    await second.aclose()
    assert not record.has_reader


async def test_a_failure_reaches_every_process(three: list[SharedStreams]):
    record = await begin(three[0])
    reader = await join(three[1])
    record.fail({"status": 500, "message": "no"})
    with pytest.raises(FailedError) as failure:
        await reader.read()
    assert failure.value.fields == {"status": 500, "message": "no"}


async def test_a_silent_reader_is_taken_for_gone(three: list[SharedStreams], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_streams, "SILENCE_S", 0.01)
    record = await begin(three[0])
    assert isinstance(await join(three[1]), RemoteReader)
    async with asyncio.timeout(30):
        while record.has_reader:  # noqa: ASYNC110 (a timer has no event)
            await asyncio.sleep(0.001)


async def test_with_the_end_of_a_process_its_answers_are_unknown_and_its_keys_free(
    three: list[SharedStreams], peers: list[Peers]
):
    record = await begin(three[0])
    reader = await join(three[1])
    await peers[0].__aexit__(None, None, None)
    with pytest.raises(UnknownStreamError):
        await three[1].open(record.id, "owner", 0)
    with pytest.raises(StreamAwayError):
        await reader.read()
    assert await begin(three[1]) is not record


async def test_a_process_that_replaces_another_one_learns_which_keys_are_in_use(
    three: list[SharedStreams], peers: list[Peers], tmp_path: Path
):
    for key in KEYS:
        await begin(three[1], key)
    await peers[0].__aexit__(None, None, None)
    assert isinstance(await join(three[2], KEYS[0]), RemoteReader)
    async with Peers(tmp_path, 0, 3) as peer:
        streams = SharedStreams()
        streams.share(peer, lambda: None)
        for asker in (streams, three[2]):
            for key in KEYS:
                assert isinstance(await join(asker, key), RemoteReader)


class Saver:
    """Stands for a database, with which the streams of a process come again."""

    def keep(self, *_: object) -> bool:
        return False


async def test_with_a_database_the_others_wait_for_a_process_that_is_replaced(
    three: list[SharedStreams], peers: list[Peers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    record = await begin(three[0])
    reader = await join(three[1])
    for streams in three:
        streams.keep(Saver(), lambda: None)  # type: ignore[arg-type]
    await peers[0].__aexit__(None, None, None)
    monkeypatch.setattr(shared_streams, "MAX_ASK_S", 0.05)
    for asked in (three[1].open(record.id, "owner", 0), three[1].claim("key", "digest", "owner", 60.0)):
        with pytest.raises(StreamAwayError):
            await asked
    monkeypatch.setattr(shared_streams, "MAX_ASK_S", 10.0)
    waiting = asyncio.create_task(three[1].open(record.id, "owner", 0))
    await asyncio.sleep(0.05)
    async with Peers(tmp_path, 0, 3) as peer:
        streams = SharedStreams()
        streams.share(peer, lambda: None)
        again = streams.table.restore(record.id, "owner", "digest", 60.0, record.key)
        assert again is not None
        again.settled.set_result(0)
        again.restore(STREAM, [b"part"])
        again.finish()
        with pytest.raises(StreamAwayError):  # its place in the process before is lost
            await reader.read()
        assert await read_all(await waiting) == [b"part"]
        assert await read_all(await join(three[2])) == [b"part"]


async def test_a_claim_that_is_cancelled_frees_its_key(three: list[SharedStreams], monkeypatch: pytest.MonkeyPatch):
    never = asyncio.Event()

    async def ask(_self: Peers, *_: object, **_options: object) -> None:
        await never.wait()

    for streams in three:
        with monkeypatch.context() as patch:
            patch.setattr(Peers, "ask_patiently", ask)
            claiming = asyncio.create_task(streams.claim("key", "digest", "owner", 60.0))
            await asyncio.sleep(0)
            claiming.cancel()
            result = (await asyncio.gather(claiming, return_exceptions=True))[0]
        assert isinstance(result, asyncio.CancelledError)
        assert len(streams.table) == 0


@pytest.mark.parametrize("asked", [0, 1])
async def test_a_stream_is_forgotten_for_its_owner_in_any_process(three: list[SharedStreams], asked: int) -> None:
    record = await begin(three[0])
    with pytest.raises(UnknownStreamError):
        await three[asked].forget(record.id, "other")
    assert not record.abandoned.is_set()
    await three[asked].forget(record.id, "owner")
    assert record.abandoned.is_set()
    with pytest.raises(UnknownStreamError):
        await three[2].forget(record.id, "owner")
