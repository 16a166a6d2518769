"""All blocks of a cache: who references them, which are free, and which can be found by their content."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_kv_cache.free_block_queue import FreeBlockQueue
from llmstack_kv_cache.prefix_index import PrefixIndex


class BlockPool:
    """Reference-counted blocks. A free block keeps its content, findable, until the block is taken for something else.

    Free blocks without a findable content are taken first, then the least recently used.

    Attributes:
        prefix_index: What can be found where.
        num_evictions: Counter of contents given up to make room.
    """

    def __init__(self, num_blocks: int, block_size: int, num_reserved_blocks: int = 0) -> None:
        self._num_reserved_blocks = num_reserved_blocks
        self.prefix_index = PrefixIndex(num_blocks, block_size)
        self.num_evictions = 0
        self._free = FreeBlockQueue(num_blocks)
        self._num_references = [0] * num_blocks
        self._free.take(num_reserved_blocks)
        self._num_references[:num_reserved_blocks] = [1] * num_reserved_blocks

    @property
    def num_blocks(self) -> int:
        """All blocks but the reserved ones."""
        return len(self._num_references) - self._num_reserved_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody references."""
        return len(self._free)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that somebody references, the reserved ones left out."""
        return self.num_blocks - self.num_free_blocks

    def num_references(self, block_id: int) -> int:
        """How many requests hold the block."""
        return self._num_references[block_id]

    def count_free(self, block_ids: Sequence[int]) -> int:
        """How many of the blocks nobody references."""
        return len(self._unreferenced(block_ids))

    def take(self, num_blocks: int) -> list[int]:
        """Takes free blocks, of which there must be as many; each has one reference and no findable content."""
        if not num_blocks:
            return []
        block_ids = self._free.take(num_blocks)
        self.num_evictions += self.prefix_index.evict(block_ids)
        references = self._num_references
        for block_id in block_ids:
            references[block_id] = 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to each of the blocks, free or not."""
        self._free.remove(self._unreferenced(block_ids))
        references = self._num_references
        for block_id in block_ids:
            references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops a reference to each of the blocks; of those that become free, the first is the first to be taken."""
        references = self._num_references
        for block_id in block_ids:
            references[block_id] -= 1
        freed = self._unreferenced(block_ids)
        keys = self.prefix_index.keys
        cached = [block_id for block_id in freed if keys[block_id] is not None]
        self._free.append(cached)
        if len(cached) < len(freed):
            self._free.prepend([block_id for block_id in freed if keys[block_id] is None])

    def inconsistencies(self) -> list[str]:
        """What does not hold although it always should; O(number of blocks)."""
        problems = self.prefix_index.inconsistencies()
        free = list(self._free)
        if len(free) != len(self._free) or free != list(reversed(list(reversed(self._free)))):
            problems.append("the links of the free blocks disagree")
        if sorted(free) != [block_id for block_id, count in enumerate(self._num_references) if not count]:
            problems.append("the free blocks are not those without references")
        return problems

    def _unreferenced(self, block_ids: Sequence[int]) -> list[int]:
        references = self._num_references
        return [block_id for block_id in block_ids if not references[block_id]]
