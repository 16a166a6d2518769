"""The pool of all blocks: their holders, and the order of eviction."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from llmstack_kv_cache.events import EventLog
from llmstack_kv_cache.prefix_index import PrefixIndex
from llmstack_kv_cache.session_ledger import SessionLedger
from llmstack_kv_cache.session_order import SessionOrder
from llmstack_kv_cache.session_turns import Segment

_MAX_BLOCKS_TO_COLLECT = 8  # a segment of its own costs some 400 bytes
_MAX_COLLECTED_BLOCKS = 64


class BlockPool:
    """Blocks that are held or free. A free block keeps its content, findable, until it is taken for something else.

    Free blocks without findable content are taken first, then those that were released as useless, then the least
    recently used. The blocks of a request are
    freed as one segment, so most operations cost a few slices, whatever the number of blocks; only blocks with several
    owners are counted one by one. Every block is in one of four states, which its holder tells:

    - None: free, without findable content;
    - a segment with free blocks: free, findable, part of the order of eviction;
    - a segment that is held: held by that one owner;
    - the marker of shared blocks: held by as many owners as are counted (reserved blocks count one that never ends).

    Attributes:
        prefix_index: The index of blocks that can be found.
        num_blocks: All blocks but the reserved ones.
        num_free_blocks: Blocks without a holder.
        num_reserved_blocks: Leading blocks that are never handed out.
        num_evictions: Counter of contents given up to make room.
        taker: The request that blocks are taken for; its user says so.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_reserved_blocks: int = 0,
        events: EventLog | None = None,
        order: SessionOrder | None = None,
        ledger: SessionLedger | None = None,
    ) -> None:
        """`order` tells what is evicted next, in place of the least recently used; `ledger` receives evictions."""
        self.prefix_index = PrefixIndex(num_blocks, block_size, events)
        self.num_blocks = self.num_free_blocks = num_blocks - num_reserved_blocks
        self.num_evictions = 0
        self.num_reserved_blocks = num_reserved_blocks
        self._shared = Segment([])
        self._num_owners = dict.fromkeys(range(num_reserved_blocks), 1)
        self._holders: list[Segment | None] = [None] * num_blocks
        self._holders[:num_reserved_blocks] = [self._shared] * num_reserved_blocks
        self._unfindable = list(range(num_blocks - 1, num_reserved_blocks - 1, -1))  # taken from its end
        self._collector: Segment | None = None
        self._useless_collector: Segment | None = None
        self._order, self._ledger, self.taker = order, ledger, ""
        # Useless first, then least recently used.
        self._segments: OrderedDict[Segment, None] = OrderedDict() if order is None else order.segments

    def is_free(self, block_id: int) -> bool:
        """Whether the block has no holder."""
        holder = self._holders[block_id]
        return holder is None or holder.num_free > 0

    def is_shared(self, block_id: int) -> bool:
        """Whether the block has, or had, several owners."""
        return self._holders[block_id] is self._shared

    def count_free(self, block_ids: Sequence[int]) -> int:
        """The number of these findable blocks that have no holder."""
        if not block_ids:
            return 0
        segments = [self._holders[block_id] for block_id in block_ids]
        if segments.count(segments[0]) == len(segments):
            return len(segments) if segments[0] and segments[0].num_free else 0
        return sum(1 for segment in segments if segment and segment.num_free)

    def take(self, num_blocks: int, owner: Segment) -> list[int]:
        """Takes free blocks, of which there must be as many, for `owner`; they have no findable content."""
        block_ids = self._unfindable[: -num_blocks - 1 : -1]
        if block_ids:
            del self._unfindable[-len(block_ids) :]
        if len(block_ids) < num_blocks:
            block_ids += self._evict(num_blocks - len(block_ids))
        holders = self._holders
        for block_id in block_ids:
            holders[block_id] = owner
        self.num_free_blocks -= num_blocks
        return block_ids

    def share(self, block_ids: Sequence[int], owner: Segment) -> None:
        """Makes `owner` an owner of each of the blocks, which are findable or held."""
        holders = self._holders
        segments = [holders[block_id] for block_id in block_ids]
        segment = segments[0] if segments else None
        if segment and segment.num_free and segments.count(segment) == len(segments):
            for block_id in block_ids:
                holders[block_id] = owner
            self._leave(segment, len(block_ids))
            return
        for block_id, segment in zip(block_ids, segments, strict=True):
            if segment is self._shared:
                self._num_owners[block_id] += 1
            elif segment and segment.num_free:
                holders[block_id] = owner
                self._leave(segment, 1)
            else:
                holders[block_id] = self._shared
                self._num_owners[block_id] = 2

    def release(self, segment: Segment, unfindable: Sequence[int] | None = None) -> None:
        """Frees what `segment` holds, blocks that others hold too excepted; the last is the first to be taken.

        Args:
            segment: Its blocks are the pool's from now on.
            unfindable: Blocks that are not findable, as far as it never shared any; None to look.
        """
        if self._order is not None and (head := self._order.take_ended(segment)) is not None:
            self.release(head)
            unfindable = None
        block_ids = segment.block_ids
        if unfindable is None or (self._num_owners and not self._num_owners.keys().isdisjoint(block_ids)):
            block_ids, runs = self._disown(segment), self.prefix_index.runs
            unfindable = [block_id for block_id in block_ids if not runs[block_id]]
        self.num_free_blocks += len(block_ids)
        if unfindable:
            self._add_unfindable(unfindable)
            if block_ids[-len(unfindable) :] == unfindable:
                del block_ids[-len(unfindable) :]
            else:
                block_ids = [block_id for block_id in block_ids if self._holders[block_id] is segment]
        if len(block_ids) <= _MAX_BLOCKS_TO_COLLECT:
            if self._order is not None:
                self._order.remove(segment)
            self._collect(block_ids)
            return
        segment.block_ids = block_ids
        segment.num_free = len(block_ids)
        self._segments[segment] = None

    def release_useless(self, segment: Segment) -> None:
        """As `release`, for findable blocks that are worth less than all others: they are the first to be evicted."""
        block_ids, runs = self._disown(segment), self.prefix_index.runs
        self.num_free_blocks += len(block_ids)
        self._add_unfindable([block_id for block_id in block_ids if not runs[block_id]])
        findable = [block_id for block_id in block_ids if runs[block_id]]
        if not findable:
            return
        first = next(iter(self._segments), None)
        if first is None or first is not self._useless_collector or len(first.block_ids) >= _MAX_COLLECTED_BLOCKS:
            first = self._useless_collector = Segment([])
            self._segments[first] = None
            self._segments.move_to_end(first, last=False)
        self._add_free(first, findable, are_next=True)

    def forget_contents(self) -> None:
        """Forgets what every block holds, the held ones included."""
        self.prefix_index.clear()
        for segment in self._segments:
            self._drop_left(segment)
            self._add_unfindable(segment.block_ids)
            segment.num_free = 0
        self._segments.clear()

    def resize(self, num_blocks: int) -> bool:
        """Changes the number of all blocks; False, with nothing done, if one that would go is held. O(all blocks)."""
        old = len(self._holders)
        if not all(self.is_free(block_id) for block_id in range(num_blocks, old)):
            return False
        for segment in list(self._segments):
            self._drop_left(segment)
            gone = [block_id for block_id in segment.block_ids if block_id >= num_blocks]
            if gone:
                self.num_evictions += self.prefix_index.evict(gone)
                segment.block_ids = [block_id for block_id in segment.block_ids if block_id < num_blocks]
                self._leave(segment, len(gone))
                self.num_free_blocks += len(gone)
        self.prefix_index.resize(num_blocks)
        self._holders[num_blocks:] = [None] * (num_blocks - old)
        added = range(num_blocks - 1, old - 1, -1)
        self._unfindable = [*added, *(block_id for block_id in self._unfindable if block_id < num_blocks)]
        self.num_free_blocks += num_blocks - old
        self.num_blocks += num_blocks - old
        return True

    def inconsistencies(self, owners: Iterable[Segment]) -> list[str]:
        """Violated invariants, where `owners` are all that hold blocks; O(number of blocks)."""
        owners = list(owners)
        held = Counter(block_id for owner in owners for block_id in owner.block_ids)
        held.update(range(self.num_reserved_blocks))
        problems = self.prefix_index.inconsistencies()
        shared = [block_id for block_id, holder in enumerate(self._holders) if holder is self._shared]
        if shared != sorted(self._num_owners) or any(held[b] != count for b, count in self._num_owners.items()):
            problems.append("references of shared blocks are not the sum of the tables")
        alone = ((b, owner) for owner in owners for b in owner.block_ids if b not in self._num_owners)
        if any(held[b] != 1 or self._holders[b] is not owner for b, owner in alone):
            problems.append("references are not the sum of the tables")
        free = self._unfindable + [block_id for segment in self._segments for block_id in self._left(segment)]
        if sorted(free) != [block_id for block_id in range(len(self._holders)) if not held[block_id]]:
            problems.append("the free blocks are not those without a holder")
        if len(free) != self.num_free_blocks or not all(map(self.is_free, free)):
            problems.append("the free blocks are miscounted")
        if any(not s.num_free or s.num_free != len(self._left(s)) for s in self._segments):
            problems.append("a segment miscounts its free blocks")
        if any(self.prefix_index.runs[block_id] for block_id in self._unfindable):
            problems.append("a free block that can be found is among those that cannot")
        return problems

    def _evict(self, num_blocks: int) -> list[int]:
        """Removes the least recently used free blocks that are findable, of which there must be as many."""
        evicted: list[int] = []
        while len(evicted) < num_blocks:
            segment = next(iter(self._segments)) if self._order is None else self._order.next()
            self._drop_left(segment)
            taken = segment.block_ids[: len(evicted) - num_blocks - 1 : -1]
            del segment.block_ids[-len(taken) :]
            segment.num_free -= len(taken)
            if self._ledger is not None and segment.turn is not None:
                self._ledger.note_evicted(segment.turn, self.prefix_index, segment.block_ids, self.taker)
            if not segment.num_free:
                del self._segments[segment]
            evicted += taken
        self.num_evictions += self.prefix_index.evict(evicted)
        return evicted

    def _collect(self, block_ids: list[int]) -> None:
        """Adds a few findable blocks to the most recently used segment, if that is one for this purpose."""
        if not block_ids:
            return
        newest = next(reversed(self._segments), None)
        if newest is None or newest is not self._collector or len(newest.block_ids) >= _MAX_COLLECTED_BLOCKS:
            newest = self._collector = Segment([])
            self._segments[newest] = None
        self._add_free(newest, block_ids, are_next=False)

    def _add_free(self, segment: Segment, block_ids: list[int], *, are_next: bool) -> None:
        """Adds blocks to a free segment, as those that are evicted first or last among its blocks."""
        self._drop_left(segment)  # a block that left it may be among those that come
        for block_id in block_ids:
            self._holders[block_id] = segment
        place = len(segment.block_ids) if are_next else 0
        segment.block_ids[place:place] = block_ids
        segment.num_free += len(block_ids)

    def _disown(self, segment: Segment) -> list[int]:
        """Takes an owner from the segment's shared blocks; its blocks without another owner."""
        left, holders, num_owners = [], self._holders, self._num_owners
        for block_id in segment.block_ids:
            count = num_owners.get(block_id, 1) - 1
            if count:
                num_owners[block_id] = count
                continue
            num_owners.pop(block_id, None)
            holders[block_id] = segment
            left.append(block_id)
        return left

    def _leave(self, segment: Segment, num_blocks: int) -> None:
        """Counts blocks that are no longer free as part of a free segment, whose holder is another by now."""
        self.num_free_blocks -= num_blocks
        segment.num_free -= num_blocks
        if self._order is not None:
            self._order.leave(segment)
        if not segment.num_free:
            del self._segments[segment]
        elif 2 * segment.num_free < len(segment.block_ids):
            self._drop_left(segment)

    def _left(self, segment: Segment) -> list[int]:
        return [block_id for block_id in segment.block_ids if self._holders[block_id] is segment]

    def _drop_left(self, segment: Segment) -> None:
        if segment.num_free < len(segment.block_ids):
            segment.block_ids = self._left(segment)

    def _add_unfindable(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._holders[block_id] = None
        self._unfindable += block_ids


def drop_blocks(pool: BlockPool, block_ids: Sequence[int]) -> None:
    """Forgets what free blocks hold that can be found; they are taken first from now on."""
    pool.prefix_index.evict([*block_ids])
    for segment, count in Counter(pool._holders[block_id] for block_id in block_ids).items():
        if segment is not None:
            pool._leave(segment, count)
            pool.num_free_blocks += count
    pool._add_unfindable(block_ids)
