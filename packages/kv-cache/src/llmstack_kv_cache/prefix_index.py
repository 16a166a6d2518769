"""Index of blocks by their prefixes: an exact lookup, without hash collisions.

Blocks that become findable together form a run: their token ids, packed into one `bytes`, and their block ids. Only
the first block of a run has an entry in a map; its key is the identity of its parent's content and its own token ids
(and, for a first block of a prefix, the salt). A lookup goes from run to run and compares token ids along each, so it
costs little more than packing them. Identities are numbers that grow and are never used twice: equal keys mean equal
prefixes, whatever became of the block ids in between. When a block is evicted its identity dies with it, and what was
chained to it can never be found again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from llmstack_kv_cache.events import BlockRemoved, BlockStored, CompanionRemoved, CompanionStored, EventLog

MAX_BLOCKS_PER_RUN = 64  # bounds what it costs to lengthen a run, or to find a block in it
_pack_identity, _unpack_identity = struct.Struct("<q").pack, struct.Struct("<q").unpack
_IDENTITY_BYTES = 8
_COMPANION_KEY_LENGTH = 9  # an identity and a group: shorter than any key with tokens


class Run:
    """Findable blocks, each the parent of the next; block i has the content identity `start + i`.

    Attributes:
        key: Where the first block is found.
        contents: Packed token ids of the other blocks.
        block_ids: At least one while the run is known; evicting a block cuts those after it off as well.
        max_blocks: How long it may become.
        parent: The run that its first block is chained to; None where that is none, or no longer known.
    """

    __slots__ = ("block_ids", "contents", "key", "max_blocks", "parent", "start")

    def __init__(
        self, start: int, key: bytes, contents: bytes, block_ids: list[int], parent: Run | None = None
    ) -> None:
        self.parent = parent
        self.start = start
        self.key = key
        self.contents = contents
        self.block_ids = block_ids
        self.max_blocks = MAX_BLOCKS_PER_RUN


class Prefix:
    """A prefix that is known: the last of its blocks, as a place in a run; the root's is before all runs."""

    __slots__ = ("index", "run")

    def __init__(self, run: Run, index: int) -> None:
        self.run = run
        self.index = index

    @property
    def identity(self) -> int:
        """Identity of its content; 0 is the empty prefix."""
        return self.run.start + self.index


RunPath = list[tuple[Run, int]]
"""The runs that a prefix goes through, and how many of its blocks are before each."""

ROOT = Prefix(Run(0, b"", b"", []), 0)
"""The empty prefix, parent of every first block."""


class PrefixIndex:
    """Exact map from prefixes, in whole blocks, to block ids.

    Attributes:
        runs: By block id, the run in which the block is found; None where it is not.
        num_findable: Blocks that can be found.
        num_cuts: Counter of runs that have lost blocks.
        events: Takes what is stored and removed; None for no events.
        group: The group of layers whose blocks tell the prefixes; None where there is one only.
        state_group: The group of states in events.
    """

    def __init__(self, num_blocks: int, block_size: int, events: EventLog | None = None) -> None:
        self.runs: list[Run | None] = [None] * num_blocks
        self.num_findable = self.num_cuts = 0
        self.events = events
        self.group: int | None = None
        self.state_group = 0
        self.block_size = block_size
        self._num_bytes = 4 * block_size
        self._key_to_run: dict[bytes, Run] = {}
        self._next_start = MAX_BLOCKS_PER_RUN

    def prefix(self, block_id: int) -> Prefix:
        """The prefix that ends with a findable block."""
        run = self.runs[block_id]
        return Prefix(run, run.block_ids.index(block_id)) if run else ROOT

    def identity(self, block_id: int) -> int | None:
        """Identity of the prefix that ends with a block; None where the block cannot be found."""
        run = self.runs[block_id] if 0 <= block_id < len(self.runs) else None
        return run.start + run.block_ids.index(block_id) if run else None

    def identities(self, block_ids: Iterable[int]) -> list[int]:
        """Identities of the prefixes that end with each of the blocks, most of which follow each other; 0 for none."""
        found, last, place = list[int](), None, 0
        for block_id in block_ids:
            run, place = self.runs[block_id], place + 1
            if run and (run is not last or run.block_ids[place : place + 1] != [block_id]):
                last, place = run, run.block_ids.index(block_id)
            found.append(run.start + place if run else 0)
        return found

    def find(self, token_ids: Sequence[int], max_blocks: int, salt: str) -> tuple[list[int], Prefix]:
        """The longest known prefix of `token_ids`, at most `max_blocks` blocks: the blocks, and what they make.

        Raises:
            ValueError: A token id does not fit into 32 bits.
        """
        if max_blocks < 1:
            return [], ROOT
        # The first block alone: most prompts that miss, miss there, and need not be packed any further.
        found, prefix = self.match(self.pack(token_ids, 0, 1), 1, ROOT, encode_salt(salt))
        if found and max_blocks > 1:
            more, prefix = self.match(self.pack(token_ids, 1, max_blocks - 1), max_blocks - 1, prefix, b"")
            found += more
        return found, prefix

    def insert(
        self,
        block_ids: list[int],
        token_ids: Sequence[int],
        parent: Prefix,
        parent_block_id: int | None,
        first: int,
        salt: str,
        may_be_findable: bool = False,
    ) -> tuple[list[int], Prefix]:
        """Makes blocks findable that hold `token_ids` from block `first` on.

        Where the same prefix is known in another block, that one stays, and what follows is chained to it.

        Args:
            block_ids: A whole block each.
            token_ids: All tokens from the first block of the prefix on.
            parent: The prefix before the blocks.
            parent_block_id: The block before them, which may be a copy of the parent's; None if there is none.
            first: Index of the first of the blocks.
            salt: The salt of the prefix.
            may_be_findable: Whether other owners may have inserted some of the blocks.

        Returns:
            The block in which the content of each is found, and the prefix that ends with the last.

        Raises:
            ValueError: A token id does not fit into 32 bits; nothing has been changed.
        """
        contents = self.pack(token_ids, first, len(block_ids))
        suffix = b"" if first else encode_salt(salt)
        known, prefix = self.match(contents, len(block_ids), parent, suffix)
        if len(known) == len(block_ids):
            return known, prefix
        # Nothing is chained to a content that was unknown until now, so all that follow are unknown as well.
        new_block_ids = block_ids[len(known) :]
        if may_be_findable:  # What hangs on a parent that is gone: otherwise its content would have been known.
            self.evict([block_id for block_id in new_block_ids if self.runs[block_id]])
        last_block_id = block_ids[len(known) - 1] if known else parent_block_id
        if known:
            contents, suffix = contents[len(known) * self._num_bytes :], b""
        return known + new_block_ids, self._add(new_block_ids, contents, prefix, last_block_id, suffix)

    def find_companion(self, identity: int, group: int) -> int | None:
        """The block that another layer group keeps for the content `identity`."""
        run = self._key_to_run.get(_companion_key(identity, group))
        return run.block_ids[0] if run else None

    def insert_companions(self, block_ids: Sequence[int], identities: Sequence[int], group: int) -> None:
        """Makes blocks of another layer group findable by the contents they belong to, unless some are known."""
        stored = []
        for block_id, identity in zip(block_ids, identities, strict=True):
            key = _companion_key(identity, group)
            if not self.runs[block_id] and key not in self._key_to_run:
                self._enter(self._new_run(key, b"", [block_id]), [block_id], ROOT, b"", b"")
                stored.append(identity)
        if self.events is not None and stored:
            self.events.add(CompanionStored(tuple(stored), self.block_size, group))

    def evict(self, block_ids: list[int]) -> int:
        """Forgets what the blocks hold, and what is chained to them in their runs; how many could be found."""
        num_findable, done = self.num_findable, 0
        while done < len(block_ids):
            run = self.runs[block_ids[done]]
            if run is None:
                done += 1
                continue
            count = _num_from_end(run.block_ids, block_ids, done)
            self._cut(run, len(run.block_ids) - count if count else run.block_ids.index(block_ids[done]))
            done += count or 1
        return num_findable - self.num_findable

    def resize(self, num_blocks: int) -> None:
        """Changes the number of blocks; those that go are not findable."""
        self.runs[num_blocks:] = [None] * (num_blocks - len(self.runs))

    def clear(self) -> None:
        """Forgets everything; identities go on growing."""
        self._key_to_run.clear()
        self.runs[:] = [None] * len(self.runs)
        self.num_findable = 0
        if self.events is not None:
            self.events.clear()

    def stored(self, state_identities: Iterable[int] = ()) -> Iterator[BlockStored | CompanionStored]:
        """The whole content of the index, parents before children; then the facts of each.

        `state_identities`: Contents after which there is a state.
        """
        start_to_run: dict[int, Run] = {}
        group_to_identities: dict[int, list[int]] = {}
        for run in self._key_to_run.values():  # in the order of their identities
            if len(run.key) == _COMPANION_KEY_LENGTH:
                identity, group = _unpack_companion(run.key)
                group_to_identities.setdefault(group, []).append(identity)
                continue
            start_to_run[run.start] = run
            head = _IDENTITY_BYTES + self._num_bytes
            (parent,) = _unpack_identity(run.key[:_IDENTITY_BYTES])
            contents, suffix = run.key[_IDENTITY_BYTES:head] + run.contents, run.key[head:]
            yield self._stored(run.start, len(run.block_ids), parent, contents, suffix)
        for group, identities in [*group_to_identities.items(), (self.state_group, state_identities)]:
            for identity in identities:
                found = start_to_run.get(identity - identity % MAX_BLOCKS_PER_RUN)
                if found is not None and identity - found.start < len(found.block_ids):
                    yield CompanionStored((identity,), self.block_size, group)

    def inconsistencies(self) -> list[str]:
        """Violated invariants; O(number of blocks)."""
        runs = list(self._key_to_run.values())
        problems = []
        if any(key != run.key for key, run in self._key_to_run.items()):
            problems.append("a run is found under another key")
        found = {block_id: run for run in runs for block_id in run.block_ids}
        if found != {block_id: run for block_id, run in enumerate(self.runs) if run}:
            problems.append("the runs and the blocks disagree on what is found where")
        if not len(found) == sum(len(run.block_ids) for run in runs) == self.num_findable:
            problems.append("the findable blocks are miscounted")
        if any(len(run.contents) != (len(run.block_ids) - 1) * self._num_bytes for run in runs):
            problems.append("a run has more or less tokens than blocks")
        if len({run.start for run in [*runs, ROOT.run]}) != len(runs) + 1:
            problems.append("two cached contents share an identity")
        return problems

    def match(
        self, contents: bytes, num_blocks: int, prefix: Prefix, suffix: bytes, first: int = 0,
        path: RunPath | None = None,
    ) -> tuple[list[int], Prefix]:  # fmt: skip
        """Follows up to `num_blocks` packed blocks after the `first` of `prefix`; those known, and what they make."""
        run, index, size = prefix.run, prefix.index, self._num_bytes
        found: list[int] = []
        while (left := num_blocks - len(found)) > 0:
            start = len(found) * size
            ahead = min(len(run.block_ids) - index - 1, left)
            if ahead > 0 and (same := _num_same(run.contents, index * size, contents, start, ahead, size)):
                found += run.block_ids[index + 1 : index + 1 + same]
                index += same
                continue
            child = self._key_to_run.get(_pack_identity(run.start + index) + contents[start : start + size] + suffix)
            if child is None:
                break
            if path is not None:
                path.append((child, first + len(found)))
            found.append(child.block_ids[0])
            run, index, suffix = child, 0, b""
        return found, Prefix(run, index)

    def _add(
        self, block_ids: list[int], contents: bytes, parent: Prefix, parent_block_id: int | None, suffix: bytes
    ) -> Prefix:
        """Makes unknown contents findable, lengthening the parent's run if it ends with the very block before them."""
        size, run, done = self._num_bytes, parent.run, 0
        if run.block_ids and run.block_ids[-1] == parent_block_id and len(run.block_ids) < run.max_blocks:
            done = min(run.max_blocks - len(run.block_ids), len(block_ids))
            run.contents += contents[: done * size]
            run.block_ids += block_ids[:done]
            parent = self._enter(run, block_ids[:done], parent, contents[: done * size], b"")
        while done < len(block_ids):
            end = min(done + MAX_BLOCKS_PER_RUN, len(block_ids))
            head, start = (done + 1) * size, done * size
            key = _pack_identity(parent.identity) + contents[start:head] + suffix
            run = self._new_run(key, contents[head : end * size], block_ids[done:end], parent.run)
            parent = self._enter(run, run.block_ids, parent, contents[start : end * size], suffix)
            suffix, done = b"", end
        return parent

    def _new_run(self, key: bytes, contents: bytes, block_ids: list[int], parent: Run | None = None) -> Run:
        run = self._key_to_run[key] = Run(self._next_start, key, contents, block_ids, parent)
        self._next_start += MAX_BLOCKS_PER_RUN
        return run

    def _enter(self, run: Run, block_ids: list[int], parent: Prefix, contents: bytes, suffix: bytes) -> Prefix:
        """Notes the last blocks of a run, which have come after `parent`; the prefix that ends with them."""
        runs = self.runs
        for block_id in block_ids:
            runs[block_id] = run
        self.num_findable += len(block_ids)
        end = len(run.block_ids)
        if self.events is not None and contents:
            first = run.start + end - len(block_ids)
            self.events.add(self._stored(first, len(block_ids), parent.identity, contents, suffix))
        return Prefix(run, end - 1)

    def _stored(self, first: int, num_blocks: int, parent: int, contents: bytes, suffix: bytes) -> BlockStored:
        identities = tuple(range(first, first + num_blocks))
        token_ids = struct.unpack(f"<{len(contents) // 4}i", contents)
        salt = suffix.decode("utf-8", "surrogatepass")
        return BlockStored(identities, parent, token_ids, self.block_size, salt, self.group)

    def _removed(self, run: Run, num_left: int) -> BlockRemoved | CompanionRemoved:
        if len(run.key) == _COMPANION_KEY_LENGTH:
            identity, group = _unpack_companion(run.key)
            return CompanionRemoved((identity,), group)
        return BlockRemoved(tuple(range(run.start + num_left, run.start + len(run.block_ids))), self.group)

    def _cut(self, run: Run, num_left: int) -> None:
        """Leaves a run its first blocks; it never grows again, since the identities of the others are used up."""
        runs, cut = self.runs, run.block_ids[num_left:]
        if self.events is not None:
            self.events.add(self._removed(run, num_left))
        for block_id in cut:
            runs[block_id] = None
        self.num_findable -= len(cut)
        if num_left:
            del run.block_ids[num_left:]
            run.contents = run.contents[: (num_left - 1) * self._num_bytes]
        else:
            run.block_ids, run.contents, run.parent = [], b"", None
            del self._key_to_run[run.key]
        run.max_blocks = 0
        self.num_cuts += 1

    def pack(self, token_ids: Sequence[int], first: int, num_blocks: int) -> bytes:
        """The token ids of blocks from `first` on, 4 bytes each: 7 ns a token, the bulk of what a lookup costs."""
        num_tokens, start = num_blocks * self.block_size, first * self.block_size
        if start or num_tokens != len(token_ids):
            token_ids = token_ids[start : start + num_tokens]
        try:
            return struct.pack(f"<{num_tokens}i", *token_ids)
        except struct.error as error:
            raise ValueError("token_ids must be integers of 32 bits") from error


def _num_same(a: bytes, start_a: int, b: bytes, start_b: int, num_blocks: int, size: int) -> int:
    """The number of equal first blocks: all at the first look, or found by bisection."""
    same, unknown, probe = 0, num_blocks, num_blocks
    while same < unknown:
        if a[start_a + same * size : start_a + probe * size] == b[start_b + same * size : start_b + probe * size]:
            same = probe
        else:
            unknown = probe - 1
        probe = (same + unknown + 1) // 2
    return same


def _num_from_end(block_ids: list[int], others: list[int], start: int) -> int:
    """The number of the others, from `start` on, that are the last blocks, the last one first."""
    count = min(len(block_ids), len(others) - start)
    if block_ids[: -count - 1 : -1] == others[start : start + count]:
        return count
    pairs = zip(reversed(block_ids), islice(others, start, None), strict=False)
    return next(number for number, (block_id, other) in enumerate(pairs) if block_id != other)


def _companion_key(identity: int, group: int) -> bytes:
    return _pack_identity(identity) + bytes((group,))


def _unpack_companion(key: bytes) -> tuple[int, int]:
    """The identity and the group of a companion's key."""
    return _unpack_identity(key[:_IDENTITY_BYTES])[0], key[_IDENTITY_BYTES]


def encode_salt(salt: str) -> bytes:
    """The salt as a part of a key."""
    return salt.encode("utf-8", "surrogatepass") if salt else b""
