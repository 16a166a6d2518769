"""Keeps responses in memory so that they can be fetched and continued; bounded by number and by bytes."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmstack_server.openai.events import encode_json
from llmstack_server.responses.events import EventLog
from llmstack_types import ServerOverloadedError

DEFAULT_MAX_RESPONSES = 1000
DEFAULT_MAX_BYTES = 64 << 20

Item = dict[str, Any]


class StoredItem(NamedTuple):
    """One item as JSON: of 5 words a quarter of the memory that the object would take, of 40 a third."""

    id: str
    data: bytes


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response with the items it read and said.

    Attributes:
        id: The response's.
        input_items: Everything the model read, earlier turns first. Turns of one conversation share them.
        output_items: What the model said; empty while it speaks.
        data: The whole object as JSON bytes; empty while the model speaks.
        events: Where it can be streamed again.
        is_background: Whether it was generated while nobody waited for it.
        is_running: True while the model speaks; then it is never evicted.
        num_bytes: What the store counts for it.
    """

    id: str
    input_items: tuple[StoredItem, ...]
    output_items: tuple[StoredItem, ...] = ()
    data: bytes = b""
    events: EventLog | None = None
    is_background: bool = False
    is_running: bool = False
    num_bytes: int = field(default=0, init=False)

    def measure(self) -> int:
        """Bytes that it keeps alive at most: what several turns share counts in each."""
        items = sum(len(item.data) for item in (*self.input_items, *self.output_items))
        return len(self.data) + items + (0 if self.events is None else self.events.num_bytes)


class ResponseStore:
    """Responses by id; the one that was longest unused goes first."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """`max_responses` 0 keeps nothing."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items = _ItemIndex()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def is_enabled(self) -> bool:
        """Whether anything is ever kept."""
        return self._max_responses > 0

    def get(self, response_id: str) -> StoredResponse | None:
        """The response, which counts as used; None where it never was or is no more."""
        stored = self._responses.get(response_id)
        if stored is not None:
            self._responses.move_to_end(response_id)
        return stored

    def put(self, stored: StoredResponse) -> None:
        """Adds a response, running or complete; a complete one that finds no room is not kept.

        Raises:
            ServerOverloadedError: It is running, and the store is full of running ones.
        """
        self._responses[stored.id] = stored
        self._items.add((*stored.input_items, *stored.output_items))
        self._recount(stored, stored.measure())

    def grow(self, stored: StoredResponse, num_bytes: int) -> None:
        """Counts further events of a running response.

        Raises:
            ServerOverloadedError: The store is full of running ones; this one is no longer kept.
        """
        if self._responses.get(stored.id) is stored:
            self._recount(stored, stored.num_bytes + num_bytes)

    def complete(self, stored: StoredResponse, data: bytes, output_items: tuple[StoredItem, ...]) -> None:
        """A running response has come to its end; one that was removed meanwhile stays so."""
        stored.data, stored.output_items, stored.is_running = data, output_items, False
        if self._responses.get(stored.id) is stored:
            self._items.add(output_items)
            self._recount(stored, stored.measure())

    def remove(self, response_id: str) -> StoredResponse | None:
        """Forgets a response and its items."""
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
            self._items.discard((*stored.input_items, *stored.output_items))
        return stored

    def find_item(self, item_id: str) -> Item | None:
        """An item that any stored response has read or said."""
        return self._items.find(item_id)

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
    """Items by id, each as long as a response has it.

    The first item under an id stays: nobody replaces another's by sending its id.
    """

    def __init__(self) -> None:
        self._items: dict[str, StoredItem] = {}
        self._num_holders: dict[str, int] = {}

    def add(self, items: Iterable[StoredItem]) -> None:
        for item in items:
            if self._items.setdefault(item.id, item) is item:
                self._num_holders[item.id] = self._num_holders.get(item.id, 0) + 1

    def discard(self, items: Iterable[StoredItem]) -> None:
        for item in items:
            if self._items.get(item.id) is item:
                self._num_holders[item.id] -= 1
                if self._num_holders[item.id] == 0:
                    del self._items[item.id], self._num_holders[item.id]

    def find(self, item_id: str) -> Item | None:
        item = self._items.get(item_id)
        return None if item is None else decode(item)


def encode(item: Item) -> StoredItem:
    """The item as it is stored."""
    return StoredItem(item["id"], encode_json(item).encode("utf-8", "replace"))


def decode(item: StoredItem) -> Item:
    """The stored item as an object."""
    found: Item = json.loads(item.data)
    return found
