"""Stored responses and their events in memory, bounded by number and by bytes."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmstack_server.web.sse import encode_json
from llmstack_types import ServerOverloadedError

DEFAULT_MAX_RESPONSES = 1000
DEFAULT_MAX_BYTES = 64 << 20

Item = dict[str, Any]


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
        data: The whole object as JSON bytes; empty while the response runs.
        events: The log of events, of a response that can be streamed again.
        is_background: Whether it is generated in the background.
        is_running: True until its end; running responses are not evicted.
        num_bytes: Its size as counted by the store.
    """

    id: str
    owner: str
    input_items: tuple[StoredItem, ...]
    output_items: tuple[StoredItem, ...] = ()
    data: bytes = b""
    events: EventLog | None = None
    is_background: bool = False
    is_running: bool = False
    num_bytes: int = field(default=0, init=False)

    def measure(self) -> int:
        """The bytes it keeps alive at most; items that several turns share count in each."""
        items = sum(len(item.data) for item in (*self.input_items, *self.output_items))
        return len(self.data) + items + (0 if self.events is None else self.events.num_bytes)


class ResponseStore:
    """Responses by id, of which the least recently used is evicted first."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """`max_responses` 0 disables the store."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items = _ItemIndex()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def is_enabled(self) -> bool:
        """Whether responses are stored at all."""
        return self._max_responses > 0

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """The response, which becomes the most recently used; None for an unknown, evicted or foreign id."""
        stored = self._responses.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        self._responses.move_to_end(response_id)
        return stored

    def put(self, stored: StoredResponse) -> None:
        """Adds a response, running or complete; a complete one that does not fit is not stored.

        Raises:
            ServerOverloadedError: The response is running, and the store is full of running ones.
        """
        self._responses[stored.id] = stored
        self._items.add(stored.owner, (*stored.input_items, *stored.output_items))
        self._recount(stored, stored.measure())

    def grow(self, stored: StoredResponse, num_bytes: int) -> None:
        """Adds the size of further events of a running response.

        Raises:
            ServerOverloadedError: The store is full of running responses; this one was removed.
        """
        if self._responses.get(stored.id) is stored:
            self._recount(stored, stored.num_bytes + num_bytes)

    def complete(self, stored: StoredResponse, data: bytes, output_items: tuple[StoredItem, ...]) -> None:
        """Stores the end of a running response, unless it was removed."""
        stored.data, stored.output_items, stored.is_running = data, output_items, False
        if self._responses.get(stored.id) is stored:
            self._items.add(stored.owner, output_items)
            self._recount(stored, stored.measure())

    def remove(self, response_id: str) -> StoredResponse | None:
        """Removes a response and its items."""
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
            self._items.discard(stored.owner, (*stored.input_items, *stored.output_items))
        return stored

    def find_item(self, item_id: str, owner: str) -> Item | None:
        """An input or output item of any stored response of the owner."""
        return self._items.find(owner, item_id)

    def _recount(self, stored: StoredResponse, num_bytes: int) -> None:
        self.num_bytes += num_bytes - stored.num_bytes
        stored.num_bytes = num_bytes
        self._evict(keep=stored)
        if self._is_over():
            self.remove(stored.id)
            if stored.is_running:
                raise ServerOverloadedError("the store of responses is full of running ones")

    def _evict(self, keep: StoredResponse) -> None:
        if not self._is_over():
            return
        for stored in list(self._responses.values()):
            if stored is not keep and not stored.is_running:
                self.remove(stored.id)
                if not self._is_over():
                    return

    def _is_over(self) -> bool:
        return len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes


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


class EventLog:
    """Framed events in the order of their sequence numbers, from 0; any number of readers follow it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._is_closed = False
        self._news = asyncio.Event()

    def append(self, event: bytes) -> None:
        """Adds an event for every reader."""
        self._events.append(event)
        self.num_bytes += len(event)
        self._tell()

    def close(self) -> None:
        """Marks the last event as the end of the log."""
        self._is_closed = True
        self._tell()

    async def read(self, start: int, *, max_events: int = 1024) -> tuple[list[bytes], bool]:
        """Events from the sequence number `start` on, once there are some, and whether they are the last."""
        while start >= len(self._events) and not self._is_closed:
            await self._news.wait()
        events = self._events[start : start + max_events]
        return events, self._is_closed and start + len(events) >= len(self._events)

    def _tell(self) -> None:
        """Wakes the waiting readers; later ones wait for the next event."""
        self._news.set()
        self._news = asyncio.Event()
