"""Stored responses and their events in memory, bounded by number and by bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.stream_record import Head, StreamRecord
from llmstack_server.web.sse import encode_json
from llmstack_types import ServerOverloadedError
from llmstack_types.json_values import JSONObject

if TYPE_CHECKING:
    from llmstack_server.state.kept_rows import KeptRequest
    from llmstack_server.state.write_behind import WriteBehind

Item = JSONObject
# Not as a stream, of which a later reader takes the place of the one before.
_HEAD: Final = Head(200, (), is_stream=False)


class StoredItem(NamedTuple):
    """One item as JSON, in a quarter (5 words) to a third (40 words) of the memory of the object."""

    id: str
    data: bytes


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response with its input and output items.

    Attributes:
        id: The id of the response.
        owner: The tenant that it belongs to; for others it does not exist.
        input_items: The input, earlier turns first. Turns of one conversation share their items.
        output_items: The output; empty while the response runs.
        data: The whole object as JSON bytes; while the response runs, the object as it began.
        events: The events of a response that can be streamed again, for any number of readers.
        is_background: Whether it is generated in the background.
        is_running: True until its end; running responses are not evicted.
        request: From which it can be generated again while it runs, where it is kept on a disk: without its input.
        source: The source of its events, where there is such a request.
        ended_s: When it ended, on the clock of the store.
        num_bytes: Its size as counted by the store.
    """

    id: str
    owner: str
    input_items: tuple[StoredItem, ...]
    output_items: tuple[StoredItem, ...] = ()
    data: bytes = b""
    events: StreamRecord | None = None
    is_background: bool = False
    is_running: bool = False
    request: KeptRequest | None = None
    source: AnswerSource | None = None
    ended_s: float | None = None
    num_bytes: int = field(default=0, init=False)

    def measure(self) -> int:
        """The bytes it keeps alive at most; items that several turns share count in each. Packs its events."""
        if self.events is not None:
            self.events.parts.pack()
        items = sum(len(item.data) for item in (*self.input_items, *self.output_items))
        events = 0 if self.events is None else self.events.parts.num_bytes
        cuts = 0 if self.source is None else self.source.num_bytes
        body = 0 if self.request is None else len(self.request.body)
        return len(self.data) + body + items + events + cuts


def events_of(response_id: str, owner: str, events: Sequence[bytes] = ()) -> StreamRecord:
    """The record of the events of one response, in the order of their sequence numbers from 0."""
    record = StreamRecord(response_id, owner)
    record.restore(_HEAD, events)
    return record


@dataclass(slots=True)
class _Share:
    """The part of the store that one owner uses.

    Attributes:
        ended: Responses that have ended, in the order of their ends.
        num_bytes: The size of all, running ones included.
        num_running, num_running_bytes: Of those that run.
    """

    ended: dict[str, StoredResponse] = field(default_factory=dict)
    num_bytes: int = 0
    num_running: int = 0
    num_running_bytes: int = 0

    def __len__(self) -> int:
        return len(self.ended) + self.num_running

    def add(self, stored: StoredResponse, sign: int = 1) -> None:
        """Counts a response; with the sign -1, no longer."""
        self.num_bytes += sign * stored.num_bytes
        if stored.is_running:
            self.num_running += sign
            self.num_running_bytes += sign * stored.num_bytes
        elif sign > 0:
            self.ended[stored.id] = stored
        else:
            del self.ended[stored.id]


class ResponseStore:
    """Responses by id. Where it is full, the owner with most in it loses the one that ended first.

    So an owner that holds no more than its share of the limits loses nothing to others.

    Attributes:
        saver: Keeps later changes on a disk, where there is one.
    """

    def __init__(
        self,
        max_responses: int,
        max_bytes: int,
        *,
        max_age_s: float | None = None,
        has_several_owners: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_responses` 0 disables the store.

        `max_age_s`: How long a response is kept after its end; None is for ever.
        `has_several_owners`: Whether running responses of one owner may take half of the store only.
        """
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._running_divisor = 2 if has_several_owners else 1
        self._clock = clock
        self._responses: dict[str, StoredResponse] = {}
        self._shares: dict[str, _Share] = {}
        self._items = _ItemIndex()
        self.saver: WriteBehind[StoredResponse] | None = None
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def is_enabled(self) -> bool:
        """Whether responses are stored at all."""
        return self._max_responses > 0

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """The response; None for an unknown, evicted or foreign id."""
        stored = self._responses.get(response_id)
        return stored if stored is not None and stored.owner == owner else None

    def put(self, stored: StoredResponse) -> None:
        """Adds a response, running or complete; a complete one that does not fit is not stored.

        Raises:
            ServerOverloadedError: The response is running, and the store has no room for another running one.
        """
        self._responses[stored.id] = stored
        self._items.add(stored.owner, (*stored.input_items, *stored.output_items))
        if not stored.is_running and stored.ended_s is None:
            stored.ended_s = self._clock()
        self._shares.setdefault(stored.owner, _Share()).add(stored)
        self._recount(stored, stored.measure())

    def grow(self, stored: StoredResponse, num_bytes: int) -> None:
        """Adds the size of further events of a running response.

        Raises:
            ServerOverloadedError: The store has no room for them; the response was removed.
        """
        if self._responses.get(stored.id) is stored:
            self._recount(stored, stored.num_bytes + num_bytes)

    def complete(self, stored: StoredResponse, data: bytes, output_items: tuple[StoredItem, ...]) -> None:
        """Stores the end of a running response, unless it was removed."""
        is_here = self._responses.get(stored.id) is stored
        if is_here:
            self._shares[stored.owner].add(stored, -1)
        stored.data, stored.output_items, stored.is_running = data, output_items, False
        stored.ended_s, stored.request, stored.source = self._clock(), None, None
        if is_here:
            self._shares[stored.owner].add(stored)
            self._items.add(stored.owner, output_items)
            self._recount(stored, stored.measure())

    def remove(self, response_id: str) -> StoredResponse | None:
        """Removes a response and its items."""
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
            share = self._shares[stored.owner]
            share.add(stored, -1)
            if not share:
                del self._shares[stored.owner]
            self._items.discard(stored.owner, (*stored.input_items, *stored.output_items))
            if self.saver is not None:
                self.saver.on_removal(stored)
        return stored

    def find_item(self, item_id: str, owner: str) -> Item | None:
        """An input or output item of any stored response of the owner."""
        return self._items.find(owner, item_id)

    def expire(self) -> None:
        """Removes responses that ended longer ago than `max_age_s`."""
        if self._max_age_s is None:
            return
        oldest_s = self._clock() - self._max_age_s
        for share in list(self._shares.values()):
            while (first := next(iter(share.ended.values()), None)) is not None:
                if (first.ended_s or 0.0) > oldest_s:
                    break
                self.remove(first.id)

    def _recount(self, stored: StoredResponse, num_bytes: int) -> None:
        change = num_bytes - stored.num_bytes
        share = self._shares[stored.owner]
        self.num_bytes += change
        share.num_bytes += change
        share.num_running_bytes += change if stored.is_running else 0
        stored.num_bytes = num_bytes
        if not self._make_room(stored):
            self.remove(stored.id)
            if stored.is_running:
                raise ServerOverloadedError("the store of responses is full of running ones")
            return
        if self.saver is not None:
            self.saver.on_change(stored)

    def _make_room(self, keep: StoredResponse) -> bool:
        """Evicts others until the limits hold; False if that takes what another owner has a right to."""
        share = self._shares[keep.owner]
        if keep.is_running and (
            share.num_running > max(1, self._max_responses // self._running_divisor)
            or share.num_running_bytes > self._max_bytes // self._running_divisor
        ):
            return False
        while (size := self._size_over_limit()) is not None:
            largest = max(self._shares.values(), key=size)
            victim = _first_ended(largest, keep) or _first_ended(share, keep)
            if victim is None:
                return False
            self.remove(victim.id)
        return True

    def _size_over_limit(self) -> Callable[[_Share], int] | None:
        """The size of a share in what there is too much of; None within the limits."""
        if len(self._responses) > self._max_responses:
            return len
        return _num_bytes if self.num_bytes > self._max_bytes else None


def _num_bytes(share: _Share) -> int:
    return share.num_bytes


def _first_ended(share: _Share, keep: StoredResponse) -> StoredResponse | None:
    return next((stored for stored in share.ended.values() if stored is not keep), None)


class _ItemIndex:
    """Items by owner and id, each as long as a response has it.

    The first item under an id stays.
    """

    def __init__(self) -> None:
        self._items: dict[tuple[str, str], StoredItem] = {}
        self._num_holders: dict[tuple[str, str], int] = {}

    def add(self, owner: str, items: Iterable[StoredItem]) -> None:
        for item in items:
            key = owner, item.id
            if self._items.setdefault(key, item) is item:
                self._num_holders[key] = self._num_holders.get(key, 0) + 1

    def discard(self, owner: str, items: Iterable[StoredItem]) -> None:
        for item in items:
            key = owner, item.id
            if self._items.get(key) is item:
                self._num_holders[key] -= 1
                if self._num_holders[key] == 0:
                    del self._items[key], self._num_holders[key]

    def find(self, owner: str, item_id: str) -> Item | None:
        item = self._items.get((owner, item_id))
        return None if item is None else decode(item)


def encode(item: Item) -> StoredItem:
    """The item in its stored form, JSON."""
    return StoredItem(item["id"], encode_json(item).encode("utf-8", "replace"))


def decode(item: StoredItem) -> Item:
    """The stored item as an object."""
    found: Item = json.loads(item.data)
    return found
