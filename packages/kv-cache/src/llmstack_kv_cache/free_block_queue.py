"""The blocks that nobody references, in the order in which they are taken: a doubly linked list over block ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class FreeBlockQueue:
    """Free blocks, the next to be taken at the front. Every operation is O(1) per block; all blocks are in it at first.

    The links are two lists indexed by block id (8 bytes per block each), with one more entry, the sentinel, that joins
    both ends. Callers see to it that a block is in the queue at most once.
    """

    __slots__ = ("_next", "_num_blocks", "_previous", "_sentinel")

    def __init__(self, num_blocks: int) -> None:
        ids = list(range(num_blocks + 1))
        self._sentinel = num_blocks
        self._next = [*ids[1:], 0]
        self._previous = [num_blocks, *ids[:-1]]
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[int]:
        """Front to back."""
        block_id = self._next[self._sentinel]
        while block_id != self._sentinel:
            yield block_id
            block_id = self._next[block_id]

    def __reversed__(self) -> Iterator[int]:
        """Back to front."""
        block_id = self._previous[self._sentinel]
        while block_id != self._sentinel:
            yield block_id
            block_id = self._previous[block_id]

    def take(self, num_blocks: int) -> list[int]:
        """Removes the first `num_blocks` blocks, of which there must be as many."""
        following, taken = self._next, []
        block_id = following[self._sentinel]
        for _ in range(num_blocks):
            taken.append(block_id)
            block_id = following[block_id]
        self._link(self._sentinel, block_id)
        self._num_blocks -= num_blocks
        return taken

    def remove(self, block_ids: Sequence[int]) -> None:
        """Removes blocks of the queue from wherever they stand."""
        following, previous = self._next, self._previous
        for block_id in block_ids:
            before, after = previous[block_id], following[block_id]
            following[before] = after
            previous[after] = before
        self._num_blocks -= len(block_ids)

    def append(self, block_ids: Sequence[int]) -> None:
        """Adds blocks at the back, so that the last one is the last to be taken."""
        self._insert_after(self._previous[self._sentinel], block_ids)

    def prepend(self, block_ids: Sequence[int]) -> None:
        """Adds blocks at the front, so that the first one is the next to be taken."""
        self._insert_after(self._sentinel, block_ids)

    def _insert_after(self, block_id: int, block_ids: Sequence[int]) -> None:
        following, previous = self._next, self._previous
        end = following[block_id]
        for inserted in block_ids:
            following[block_id] = inserted
            previous[inserted] = block_id
            block_id = inserted
        self._link(block_id, end)
        self._num_blocks += len(block_ids)

    def _link(self, block_id: int, next_block_id: int) -> None:
        self._next[block_id] = next_block_id
        self._previous[next_block_id] = block_id
