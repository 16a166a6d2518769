"""Preprocessed media by digest: held by requests, then kept while there is room."""

from __future__ import annotations

import resource
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from llmstack_media.memory import SealedMemory
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.shares import Shares, TenantLru
from llmstack_types import ServerOverloadedError
from llmstack_types.media import MediaItem
from llmstack_types.vocabulary import MediaKind

Key = tuple[str, bytes]
"""A tenant and a digest: another tenant's entry is never found, nor its absence noticed."""
MAX_ENTRIES = 4096
DESCRIPTOR_SHARE = 4
"""Each entry has a descriptor. One in so many of a process may be of the store, which leaves the others to clients."""
MAX_KNOWN = 16_384


@dataclass(frozen=True, slots=True)
class Counted:
    """The facts of a picture's header.

    Attributes:
        layout: What it becomes.
        num_pixels: What has to be decoded for it; of a sound, samples.
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
    """Entries in order of use. The bytes of all stay within a capacity, unless those that are held exceed it alone.

    Where one has to be forgotten, the tenant that has most loses the one it used longest ago, so that no tenant's
    pictures make another's disappear. Headers and names are kept by the same rule.
    """

    def __init__(self, cache_bytes: int, max_held_bytes: int) -> None:
        """The limits.

        Args:
            cache_bytes: Of entries together. Over it, those that are not held are forgotten, least recently used first.
            max_held_bytes: Of those that are held.
        """
        self._cache_bytes = cache_bytes
        self._entries: dict[Key, Entry] = {}
        self._unused: dict[str, OrderedDict[Key, Entry]] = {}
        self._counts: TenantLru[bytes, Counted] = TenantLru(MAX_KNOWN)
        self._aliases: TenantLru[str, bytes] = TenantLru(MAX_KNOWN)
        self._bytes_of: Counter[str] = Counter()
        self._entries_of: Counter[str] = Counter()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_entries = max(1, min(MAX_ENTRIES, descriptors // DESCRIPTOR_SHARE))
        self._held_bytes = Shares(max_held_bytes)
        self._held_entries = Shares(self._max_entries)
        self._reserved_bytes = 0
        self._num_reserved = 0
        self.num_queries = 0
        self.num_hits = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return self._bytes_of.total()

    @property
    def held_bytes(self) -> int:
        """Bytes of the entries that requests use, and of those that are being made."""
        return self._held_bytes.held

    def counted(self, key: Key) -> Counted | None:
        """The facts of a picture's header that was read before, also where its entry is forgotten."""
        return self._counts.get(*key)

    def remember(self, key: Key, counted: Counted) -> None:
        """Keeps what a header said, so that the picture is not read again to be counted."""
        self._counts.put(*key, counted)

    def acquire(self, key: Key) -> Entry | None:
        """The entry, held until `release`; None where there is none."""
        self.num_queries += 1
        entry = self._entries.get(key)
        if entry is None:
            return None
        self.num_hits += 1
        self.hold(entry)
        return entry

    def reserve(self, tenant: str, num_bytes: int) -> None:
        """Sets bytes aside for an entry that is being made; `add` or `cancel` follows.

        Raises:
            ServerOverloadedError: Requests of this key or of all hold too much.
        """
        has_place = self._held_entries.take(tenant, 1)
        if not has_place or not self._held_bytes.take(tenant, num_bytes):
            self._held_entries.add(tenant, -int(has_place))
            raise ServerOverloadedError("the media of running requests take all memory for media", reason="media")
        self._reserved_bytes += num_bytes
        self._num_reserved += 1
        self._make_room()

    def cancel(self, tenant: str, num_bytes: int) -> None:
        """Gives bytes back that were set aside."""
        self._count_held(tenant, -1, -num_bytes)
        self._reserved_bytes -= num_bytes
        self._num_reserved -= 1

    def add(self, key: Key, layout: ImageLayout, memory: SealedMemory) -> Entry:
        """Puts in what was made of reserved bytes; it is held until `release`. Another one of the key is replaced only
        where it is not there.
        """
        self.cancel(key[0], memory.num_bytes)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key, layout, memory)
            self._bytes_of[key[0]] += memory.num_bytes
            self._entries_of[key[0]] += 1
        else:
            memory.close()
        self.hold(entry)
        self._make_room()
        return entry

    def release(self, entry: Entry) -> None:
        """Ends the use of an entry by one request."""
        entry.num_references -= 1
        if not entry.num_references:
            self._count_held(entry.key[0], -1, -entry.memory.num_bytes)
            self._unused.setdefault(entry.key[0], OrderedDict())[entry.key] = entry
            self._make_room()

    def set_alias(self, tenant: str, name: str, digest: bytes) -> None:
        """Lets a name of one tenant stand for a digest."""
        self._aliases.put(tenant, name, digest)

    def find_alias(self, tenant: str, name: str) -> bytes | None:
        """The digest that a tenant's name stands for; None where it stands for none."""
        return self._aliases.get(tenant, name)

    def close(self) -> None:
        """Frees all memory. Nothing may be held any more."""
        for entry in self._entries.values():
            entry.memory.close()
        self._entries.clear()
        self._unused.clear()
        self._bytes_of.clear()

    def hold(self, entry: Entry) -> None:
        """Holds an entry once more, until `release`."""
        tenant = entry.key[0]
        if not entry.num_references:
            self._count_held(tenant, 1, entry.memory.num_bytes)
            if tenant in self._unused:
                self._unused[tenant].pop(entry.key, None)
        entry.num_references += 1

    def _count_held(self, tenant: str, num_entries: int, num_bytes: int) -> None:
        self._held_entries.add(tenant, num_entries)
        self._held_bytes.add(tenant, num_bytes)

    def _make_room(self) -> None:
        """Forgets entries that are not held."""
        while amounts := self._exceeded():
            tenants = [tenant for tenant, entries in self._unused.items() if entries]
            if not tenants:
                return
            tenant = max(tenants, key=amounts.__getitem__)
            key, entry = self._unused[tenant].popitem(last=False)
            del self._entries[key]
            self._bytes_of[tenant] -= entry.memory.num_bytes
            self._entries_of[tenant] -= 1
            entry.memory.close()

    def _exceeded(self) -> Counter[str] | None:
        """Bytes or entries of each tenant, if all together exceed that limit; None within both limits."""
        if self.num_bytes + self._reserved_bytes > self._cache_bytes:
            return self._bytes_of
        return self._entries_of if len(self._entries) + self._num_reserved > self._max_entries else None


class PreparedMedia:
    """A picture, video or sound in memory that an engine core can read until `release`."""

    def __init__(self, store: MediaStore, entry: Entry, kind: MediaKind = "image") -> None:
        self._store = store
        self._kind: MediaKind = kind
        self._entry: Entry | None = entry
        self._digest = entry.key[1]

    def item(self, offset: int, num_tokens: int, embed_runs: tuple[tuple[int, int], ...] = ()) -> MediaItem:
        """The item of a prompt, at the place that the caller's tokens have for it.

        Raises:
            ValueError: It is released.
        """
        if self._entry is None:
            raise ValueError("the picture is released")
        layout = self._entry.layout
        return MediaItem(
            self._digest, self._kind, offset, num_tokens, embed_runs, layout.grid, layout.num_units,
            self._entry.memory.as_media_memory(),
        )  # fmt: skip

    def release(self) -> None:
        """Ends the use by one request. Idempotent."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._store.release(entry)
