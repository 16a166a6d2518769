"""Cached prefixes as keys of segments, for routers that know many caches.

A segment is a number of whole blocks. Its key is a hash of the salt and of all tokens up to its end, so equal keys mean
equal prefixes of one tenant, in any process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import islice

from llmstack_kv_cache.events import (
    AllCleared,
    BlockRemoved,
    BlockStored,
    CompanionRemoved,
    CompanionStored,
    KVCacheEvent,
)
from llmstack_kv_cache.prefix_index import MAX_BLOCKS_PER_RUN

MIN_SEGMENT_TOKENS = 128
KEY_BYTES = 8


def segment_blocks(block_size: int) -> int:
    """Blocks of one segment: as few as hold `MIN_SEGMENT_TOKENS` tokens."""
    return -(-MIN_SEGMENT_TOKENS // block_size)


def segment_keys(token_ids: Sequence[int], block_size: int, salt: str = "", max_segments: int = 1 << 62) -> list[int]:
    """The keys of the first whole segments of a prompt, by which `CachedSegments` of any cache knows them."""
    num_tokens = segment_blocks(block_size) * block_size
    num_segments = min(len(token_ids) // num_tokens, max_segments)
    if not num_segments:
        return []
    contents = _pack(token_ids, num_segments * num_tokens)
    key, keys = _root_key(salt), []
    for start in range(0, len(contents), 4 * num_tokens):
        key = _next_key(key, contents[start : start + 4 * num_tokens])
        keys.append(int.from_bytes(key, "little"))
    return keys


class _Run:
    """Blocks that were stored after each other, as far as known.

    Attributes:
        num_before: Tokens of the prefix before the run, in bytes, that belong to its first segment.
        key: Of the last whole segment before the run.
        contents: Those bytes, and the tokens of the run.
        keys: Of the segments that end in the run.
        children: First identity of a run that continues this one to the number of blocks after which it does.
    """

    __slots__ = ("children", "contents", "key", "keys", "num_before", "parent")

    def __init__(self, parent: int, key: bytes, before: bytes) -> None:
        self.parent = parent
        self.key = key
        self.num_before = len(before)
        self.contents = before
        self.keys: list[bytes] = []
        self.children: dict[int, int] = {}


class CachedSegments:
    """The segments that a cache can find, by its events; exact after each event.

    Attributes:
        keys: The keys of all segments, in the order in which they were stored.
    """

    def __init__(self, block_size: int) -> None:
        self.keys: dict[int, None] = {}
        self._num_bytes = 4 * block_size
        self._segment_bytes = segment_blocks(block_size) * self._num_bytes
        self._runs: dict[int, _Run] = {}
        self._changes: dict[int, bool] = {}
        self._was_cleared = False

    def apply(self, event: KVCacheEvent) -> None:
        """Takes one event. Blocks that continue an unknown prefix cannot be found, so they are left out.

        Which further groups and states are there has no effect: a prefix may be computed again in part for want of one.
        """
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                self._remove(event.identities[0])
            case AllCleared():
                self.clear()
            case CompanionStored() | CompanionRemoved():  # pragma: no branch - there is no other event
                pass

    def clear(self) -> None:
        """Removes all blocks of the index."""
        self._runs.clear()
        self.keys.clear()
        self._changes.clear()
        self._was_cleared = True

    def take(self) -> tuple[bool, list[int], list[int]]:
        """Since the last call: whether everything was cleared, and the keys that came and went after that."""
        changes, was_cleared = self._changes, self._was_cleared
        self._changes, self._was_cleared = {}, False
        added = [key for key, is_stored in changes.items() if is_stored]
        return was_cleared, added, [key for key, is_stored in changes.items() if not is_stored]

    @property
    def has_changes(self) -> bool:
        """Whether the next `take` will say anything."""
        return self._was_cleared or bool(self._changes)

    def _store(self, event: BlockStored) -> None:
        first = event.identities[0]
        start = first - first % MAX_BLOCKS_PER_RUN
        run = self._runs.get(start)
        if first == start:
            run = self._begin(start, event)
        if run is None or self._num_blocks(run) != first - start:
            return
        run.contents += _pack(event.token_ids, len(event.token_ids))
        size = self._segment_bytes
        while len(run.contents) >= (len(run.keys) + 1) * size:
            key = run.keys[-1] if run.keys else run.key
            end = (len(run.keys) + 1) * size
            key = _next_key(key, run.contents[end - size : end])
            run.keys.append(key)
            self._note(key, is_stored=True)

    def _begin(self, start: int, event: BlockStored) -> _Run | None:
        parent = event.parent_identity
        if not parent:
            run = _Run(0, _root_key(event.salt), b"")
        else:
            parent_start = parent - parent % MAX_BLOCKS_PER_RUN
            before, num_blocks = self._runs.get(parent_start), parent - parent_start + 1
            if before is None or num_blocks > self._num_blocks(before):
                return None
            end = before.num_before + num_blocks * self._num_bytes
            num_keys, num_rest = divmod(end, self._segment_bytes)
            key = before.keys[num_keys - 1] if num_keys else before.key
            run = _Run(parent_start, key, before.contents[end - num_rest : end])
            before.children[start] = num_blocks
        self._runs[start] = run
        return run

    def _remove(self, first: int) -> None:
        """Removes a run from the content `first` on, and all that continues what is gone."""
        start = first - first % MAX_BLOCKS_PER_RUN
        ends = [(start, first - start)]
        while ends:
            start, num_left = ends.pop()
            run = self._runs.get(start)
            if run is None:
                continue
            ends += [(child, 0) for child, num_blocks in run.children.items() if num_blocks > num_left]
            end = run.num_before + num_left * self._num_bytes
            num_keys = end // self._segment_bytes
            for key in run.keys[num_keys:]:
                self._note(key, is_stored=False)
            if num_left:
                del run.keys[num_keys:]
                run.contents = run.contents[:end]
                run.children = {child: count for child, count in run.children.items() if count <= num_left}
                continue
            del self._runs[start]
            if run.parent in self._runs:
                self._runs[run.parent].children.pop(start, None)

    def _num_blocks(self, run: _Run) -> int:
        return (len(run.contents) - run.num_before) // self._num_bytes

    def _note(self, packed: bytes, *, is_stored: bool) -> None:
        key = int.from_bytes(packed, "little")
        if is_stored:
            self.keys[key] = None
        else:
            self.keys.pop(key, None)
        if self._changes.get(key, is_stored) != is_stored:
            del self._changes[key]
        else:
            self._changes[key] = is_stored


def pack_keys(keys: Sequence[int]) -> bytes:
    """The keys as a message carries them, `KEY_BYTES` bytes each."""
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    """The inverse of `pack_keys`."""
    return struct.unpack(f"<{len(packed) // KEY_BYTES}Q", packed)


def _root_key(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def _next_key(key: bytes, contents: bytes) -> bytes:
    return hashlib.blake2b(key + contents, digest_size=KEY_BYTES).digest()


def _pack(token_ids: Sequence[int], num_tokens: int) -> bytes:
    return struct.pack(f"<{num_tokens}i", *islice(token_ids, num_tokens))
