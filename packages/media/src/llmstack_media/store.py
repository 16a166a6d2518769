"""Preprocessed media by digest: held by requests, then kept while there is room."""

from __future__ import annotations

import resource
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from llmstack_media.memory import SealedMemory
from llmstack_media.processors.layout import ImageLayout
from llmstack_types import ServerOverloadedError

_K = TypeVar("_K")
_V = TypeVar("_V")
Key = tuple[str, bytes]
"""A tenant and a digest: another tenant's entry is never found, nor its absence noticed."""
MAX_ENTRIES = 4096
DESCRIPTOR_SHARE = 4
"""Each entry has a descriptor. One in so many of a process may be of the store, which leaves the others to clients."""
MAX_KNOWN = 16_384


@dataclass(frozen=True, slots=True)
class Counted:
    """What a picture's header says.

    Attributes:
        layout: What it becomes.
        num_pixels: What has to be decoded for it.
    """

    layout: ImageLayout
    num_pixels: int


@dataclass(slots=True, eq=False)
class Entry:
    """One picture as an encoder reads it."""

    key: Key
    layout: ImageLayout
    memory: SealedMemory
    num_references: int = field(default=0)


class MediaStore:
    """Entries in order of use. The bytes of all stay within a capacity, unless those that are held exceed it alone."""

    def __init__(self, cache_bytes: int, max_held_bytes: int) -> None:
        """The limits.

        Args:
            cache_bytes: Of entries together. Over it, those that are not held are forgotten, least recently used first.
            max_held_bytes: Of those that are held.
        """
        self._cache_bytes = cache_bytes
        self._max_held_bytes = max_held_bytes
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._counts: OrderedDict[Key, Counted] = OrderedDict()
        self._aliases: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._num_bytes = 0
        self._held_bytes = 0
        self._reserved_bytes = 0
        self._num_held = 0
        self._num_reserved = 0
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_entries = max(1, min(MAX_ENTRIES, descriptors // DESCRIPTOR_SHARE))
        self.num_queries = 0
        self.num_hits = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return self._num_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the entries that requests use, and of those that are being made."""
        return self._held_bytes + self._reserved_bytes

    def counted(self, key: Key) -> Counted | None:
        """What the header of a picture said that was seen before, also where its entry is forgotten."""
        found = self._counts.get(key)
        if found is not None:
            self._counts.move_to_end(key)
        return found

    def remember(self, key: Key, counted: Counted) -> None:
        """Keeps what a header said, so that the picture is not read again to be counted."""
        _put(self._counts, key, counted)

    def acquire(self, key: Key) -> Entry | None:
        """The entry, held until `release`; None where there is none."""
        self.num_queries += 1
        entry = self._entries.get(key)
        if entry is None:
            return None
        self.num_hits += 1
        self.hold(entry)
        return entry

    def reserve(self, num_bytes: int) -> None:
        """Sets bytes aside for an entry that is being made; `add` or `cancel` follows.

        Raises:
            ServerOverloadedError: Requests hold too much.
        """
        if self.held_bytes + num_bytes > max(self._max_held_bytes, num_bytes if not self.held_bytes else 0):
            raise _too_much_held()
        if self._num_held + self._num_reserved >= self._max_entries:
            raise _too_much_held()
        self._reserved_bytes += num_bytes
        self._num_reserved += 1
        self._make_room()

    def cancel(self, num_bytes: int) -> None:
        """Gives bytes back that were set aside."""
        self._reserved_bytes -= num_bytes
        self._num_reserved -= 1

    def add(self, key: Key, layout: ImageLayout, memory: SealedMemory) -> Entry:
        """Puts in what was made of reserved bytes; it is held until `release`. Another one of the key is replaced only
        where it is not there.
        """
        self.cancel(memory.num_bytes)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key, layout, memory)
            self._num_bytes += memory.num_bytes
        else:
            memory.close()
        self.hold(entry)
        self._make_room()
        return entry

    def release(self, entry: Entry) -> None:
        """Ends the use of an entry by one request."""
        entry.num_references -= 1
        if not entry.num_references:
            self._held_bytes -= entry.memory.num_bytes
            self._num_held -= 1
            self._make_room()

    def set_alias(self, tenant: str, name: str, digest: bytes) -> None:
        """Lets a name of one tenant stand for a digest."""
        _put(self._aliases, (tenant, name), digest)

    def find_alias(self, tenant: str, name: str) -> bytes | None:
        """The digest that a tenant's name stands for; None where it stands for none."""
        return self._aliases.get((tenant, name))

    def close(self) -> None:
        """Frees all memory. Nothing may be held any more."""
        for entry in self._entries.values():
            entry.memory.close()
        self._entries.clear()
        self._num_bytes = self._held_bytes = 0

    def hold(self, entry: Entry) -> None:
        """Holds an entry once more, until `release`."""
        if not entry.num_references:
            self._held_bytes += entry.memory.num_bytes
            self._num_held += 1
        entry.num_references += 1
        self._entries.move_to_end(entry.key)

    def _make_room(self) -> None:
        """Forgets entries that are not held."""
        for entry in list(self._entries.values()):
            is_full = self._num_bytes + self._reserved_bytes > self._cache_bytes
            if not is_full and len(self._entries) + self._num_reserved <= self._max_entries:
                return
            if not entry.num_references:
                del self._entries[entry.key]
                self._num_bytes -= entry.memory.num_bytes
                entry.memory.close()


def _too_much_held() -> ServerOverloadedError:
    return ServerOverloadedError("the images of running requests take all memory for images", reason="media")


def _put(mapping: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    mapping[key] = value
    mapping.move_to_end(key)
    while len(mapping) > MAX_KNOWN:
        mapping.popitem(last=False)
