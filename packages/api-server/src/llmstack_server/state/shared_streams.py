"""Answers that outlive their connections, in any process of the server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from llmstack_server.state.peers import Peers
from llmstack_server.state.remote_streams import MAX_WAIT_S, READING, Reader, RemoteReader, RemoteReaders
from llmstack_server.state.stream_record import StreamAwayError, StreamReader, StreamRecord, UnknownStreamError
from llmstack_server.state.stream_table import StreamTable
from llmstack_types.json_values import JSONObject, JSONValue

if TYPE_CHECKING:
    from llmstack_server.state.stream_saver import StreamSaver

TOPIC = "streams"
MAX_REMEMBERED = 65_536
MAX_TRIES = 3
# As long as an API process takes to be replaced.
MAX_ASK_S = 10.0
ANY_REQUEST = "-"
UNSETTLED = -1

_STREAM_ID = re.compile(r"[0-9a-f]{32}")


class KeyReusedError(Exception):
    """The key was used for another request."""


class SharedStreams:
    """Streams by id, and by the keys of their requests.

    With several processes, the id of a stream says which one has it. The process that follows from a key remembers
    which one has claimed it last, and asks that one before it gives the key to another: of two retries at the same
    time in two processes, one joins the other. A process that replaces another one learns from the others what it
    has to remember. With a database a process that has ended comes again with its streams, and the others wait for it.
    """

    def __init__(self) -> None:
        self.table = StreamTable()
        self._peers: Peers | None = None
        self._key_to_index: OrderedDict[str, int] = OrderedDict()
        self._learning = asyncio.Lock()
        self._has_learned = False
        self._readers = RemoteReaders()
        self.saver: StreamSaver | None = None
        self._restore: Callable[[], None] = lambda: None

    def keep(self, saver: StreamSaver, restore: Callable[[], None]) -> None:
        """Lets streams outlive the server. `restore`: Puts those of an earlier one into the table, once."""
        self.saver = saver
        self._restore = restore

    async def claim_restored(self, keys: Iterable[str]) -> None:
        """Tells the other processes which keys of an earlier server are here."""
        for key in keys:
            with contextlib.suppress(StreamAwayError):  # it learns of them when it is up
                await self._claim_in_server(key)

    def share(self, peers: Peers | None, on_abandoned: Callable[[], object]) -> None:
        """Shares the streams with the other processes of the server. `on_abandoned`: As of `StreamTable`."""
        index, count = (0, 1) if peers is None else (peers.index, peers.count)
        self.table = StreamTable(index, count, on_abandoned)
        self._peers = peers
        if peers is not None:
            peers.add_topic(TOPIC, self._answer)

    async def open(self, stream_id: str, owner: str, after: int, digest: str = ANY_REQUEST) -> Reader:
        """A reader of the parts of a stream after the number `after`, which replaces the one before.

        Raises:
            UnknownStreamError: There is no such stream or part, it is another owner's, or of another request.
            StreamAwayError: Its process does not answer.
        """
        index = self._index_of(stream_id)
        if index is None:
            return self._open_here(stream_id, owner, after, digest)
        return await self._open_there(index, f"open {stream_id} {after} {digest} {owner}", after)

    async def forget(self, stream_id: str, owner: str) -> None:
        """Removes a stream; without a reader its answer is not generated any further.

        Raises:
            UnknownStreamError: There is none, or it is another owner's.
            StreamAwayError: Its process does not answer.
        """
        index = self._index_of(stream_id)
        if index is None or self._peers is None:
            is_known = self._forget_here(stream_id, owner)
        else:
            is_known = await self._ask(self._peers, index, f"forget {stream_id} {owner}")
        if not is_known:
            raise UnknownStreamError

    def _index_of(self, stream_id: str) -> int | None:
        """The index of the process that has a stream, if it exists; None for this process."""
        if not _STREAM_ID.fullmatch(stream_id):
            raise UnknownStreamError
        self._restore()
        index = int(stream_id, 16) % self.table.count
        return None if index == self.table.index or self._peers is None else index

    async def claim(self, key: str, digest: str, owner: str, keep_s: float) -> StreamRecord | Reader | None:
        """A new record for a request with a key, or a reader of the answer that there is; None where there is no room.

        Raises:
            KeyReusedError: The key was used for another request.
            StreamAwayError: A process that may have it does not answer.
        """
        self._restore()
        key = hashlib.sha256(f"{owner} {key}".encode()).hexdigest()[:32]
        for _ in range(MAX_TRIES):
            known = self.table.with_key(key)
            if known is not None:
                index = await asyncio.shield(known.settled)
                if index == UNSETTLED:
                    continue
                if index == self.table.index:
                    return _join(known, digest)
            else:
                record = self.table.add(owner, digest, keep_s, key)
                index = await self._settle(record, key)
                if index == self.table.index:
                    return record
            try:
                return await self._open_there(index, f"join {key} {digest}", 0)
            except UnknownStreamError:
                continue  # it has ended meanwhile
        return None

    async def _settle(self, record: StreamRecord | None, key: str) -> int:
        """Agrees with the other processes on the one that answers; if that is another one, the record is removed."""
        index = UNSETTLED
        try:
            index = await self._claim_in_server(key)
        finally:  # also where the request is cancelled
            if record is not None:
                record.settled.set_result(index)
                if index != self.table.index:
                    self.table.remove(record)
        return index

    async def _claim_in_server(self, key: str) -> int:
        peers = self._peers
        if peers is None:
            return self.table.index
        home = int(key, 16) % peers.count
        if home == peers.index:
            return await self._holder(peers, key, peers.index)
        index = await self._ask(peers, home, f"claim {key} {peers.index}")
        if isinstance(index, int) and 0 <= index < peers.count:
            return index
        # It has ended, and learns of the key when it is up again.
        held = await self._ask_others(peers, f"held {key}")
        return next((index for index, is_held in held.items() if is_held), peers.index)

    async def _ask(self, peers: Peers, index: int, question: str) -> JSONValue:
        """The answer of another process; None where it has ended, and its streams with it.

        Raises:
            StreamAwayError: It gives none.
        """
        is_kept = self.saver is not None
        try:
            return await peers.ask_patiently(index, f"{TOPIC} {question}", MAX_ASK_S, awaits_start=is_kept)
        except TimeoutError:
            raise StreamAwayError from None

    async def _ask_others(self, peers: Peers, question: str) -> dict[int, JSONValue]:
        others = [index for index in range(peers.count) if index != peers.index]
        answers = await asyncio.gather(*(self._ask(peers, index, question) for index in others))
        return dict(zip(others, answers, strict=True))

    async def _learn(self, peers: Peers) -> None:
        """Learns once which keys the others have: the process of this index before knew them."""
        async with self._learning:
            if not self._has_learned:
                for index, keys in (await self._ask_others(peers, f"keys {peers.index}")).items():
                    self._key_to_index.update((str(key), index) for key in keys or ())
                self._key_to_index.update((key, peers.index) for key in self.table.settled_keys)
                self._has_learned = True

    async def _holder(self, peers: Peers, key: str, index: int) -> int:
        """The process that has the answer, or `index`, which then claims the key."""
        if not self._has_learned:
            await self._learn(peers)
        last = self._key_to_index.get(key, index)
        if last != index:
            is_held = self._holds(key) if last == peers.index else await self._ask(peers, last, f"held {key}")
            if is_held:
                return last
            if self._key_to_index.get(key) != last:  # another process has claimed it meanwhile
                return self._key_to_index.get(key, index)
        self._key_to_index[key] = index
        self._key_to_index.move_to_end(key)
        if len(self._key_to_index) > MAX_REMEMBERED:
            self._key_to_index.popitem(last=False)
        return index

    def _holds(self, key: str) -> bool:
        return self.table.with_key(key) is not None

    def _open_here(self, stream_id: str, owner: str, after: int, digest: str) -> StreamReader:
        record = self.table.get(stream_id, owner)
        if record is None or digest not in (ANY_REQUEST, record.digest):
            raise UnknownStreamError
        return record.open(after)

    def _forget_here(self, stream_id: str, owner: str) -> bool:
        record = self.table.get(stream_id, owner)
        if record is not None:
            self.table.remove(record)
        return record is not None

    async def _open_there(self, index: int, question: str, after: int) -> Reader:
        peers = self._peers
        answer = None if peers is None else await self._ask(peers, index, question)
        if peers is None or not isinstance(answer, dict) or "error" in answer:
            raise KeyReusedError if isinstance(answer, dict) and answer["error"] == "reused" else UnknownStreamError
        return RemoteReader(lambda text: peers.ask_one(index, f"{TOPIC} {text}"), answer, after)

    async def _answer(self, question: str) -> JSONValue:
        """The answer to another process."""
        self._restore()
        what, *words = question.split(" ")  # without API keys the owner, which is the last word, is empty
        if what == "claim" and self._peers is not None:
            with contextlib.suppress(StreamAwayError):
                return await self._holder(self._peers, words[0], int(words[1]))
            return None  # it asks again
        if what == "keys":
            return [key for key in self.table.settled_keys if int(key, 16) % self.table.count == int(words[0])]
        if what == "held":
            return self._holds(words[0])
        if what in READING:
            return await self._readers.answer(what, words)
        if what == "forget":
            return self._forget_here(words[0], words[1])
        return await self._opened(what, words)

    async def _opened(self, what: str, words: list[str]) -> JSONObject:
        try:
            if what == "open":
                stream_id, after, digest, *owner = words
                return self._readers.add(self._open_here(stream_id, owner[0] if owner else "", int(after), digest))
            return self._readers.add(await self._join_settled(*words[:2]))
        except KeyReusedError:
            return {"error": "reused"}
        except (UnknownStreamError, TimeoutError):
            return {"error": "unknown"}

    async def _join_settled(self, key: str, digest: str) -> StreamReader:
        record = self.table.with_key(key)
        if record is None:
            raise UnknownStreamError
        async with asyncio.timeout(MAX_WAIT_S):
            if await asyncio.shield(record.settled) != self.table.index:
                raise UnknownStreamError
        return _join(record, digest)


def _join(record: StreamRecord, digest: str) -> StreamReader:
    if record.digest != digest:
        raise KeyReusedError
    return record.open(0)
