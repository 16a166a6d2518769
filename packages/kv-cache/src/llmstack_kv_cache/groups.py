"""Groups of layers with equal windows, and their block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_

from llmstack_kv_cache.block import BlockTable, check_integer, num_blocks_for
from llmstack_kv_cache.block_pool import BlockPool

NEVER = 2**62
"""More tokens than any request has."""

NULL_BLOCK_ID = 0
"""Stands in a block table where a window has passed: a valid block that no request is ever given."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share block tables.

    Attributes:
        name: For messages.
        sliding_window: How many tokens a token attends to, itself included; None for all.
    """

    name: str
    sliding_window: int | None = None

    def first_needed_block(self, num_tokens: int, block_size: int) -> int:
        """Index of the first block that any token from position `num_tokens` on attends to."""
        if self.sliding_window is None:
            return 0
        return max(num_tokens - self.sliding_window + 1, 0) // block_size

    def next_passed_token(self, num_tokens: int, block_size: int) -> int:
        """How many tokens must be computed before the window passes another block than it has with `num_tokens`."""
        if self.sliding_window is None:
            return NEVER
        return (self.first_needed_block(num_tokens, block_size) + 1) * block_size + self.sliding_window - 1

    def num_blocks_needed(
        self, num_tokens: int, num_computed_tokens: int, max_num_step_tokens: int, block_size: int
    ) -> int:
        """Most blocks that a request holds at once while it grows from `num_computed_tokens` to `num_tokens`.

        It computes at most `max_num_step_tokens` at a time, and its window is advanced before each step.
        """
        num_blocks = num_blocks_for(num_tokens, block_size)
        if self.sliding_window is None:
            return num_blocks
        window = max(self.sliding_window, 2)  # a prefix hit holds its last block, whatever the window
        first = max(num_computed_tokens - window + 1, 0) // block_size
        num_span_tokens = window - 1 + max_num_step_tokens
        return min(num_blocks - first, (num_span_tokens + block_size - 2) // block_size + 1)


class GroupTable(BlockTable):
    """The blocks of one request in one group.

    Attributes:
        num_passed_blocks: Leading blocks that the window has passed; `block_ids` begins after them.
        useful: Indices of blocks that lookups are likely to want, also when the window has passed them.
    """

    __slots__ = ("num_passed_blocks", "useful")

    def __init__(self, salt: str, num_passed_blocks: int = 0, useful: Sequence[range] = ()) -> None:
        super().__init__(salt)
        self.num_passed_blocks = num_passed_blocks
        self.useful = tuple(useful)

    @property
    def num_blocks(self) -> int:
        """The length of the table in blocks, freed ones included."""
        return self.num_passed_blocks + len(self.block_ids)

    def pass_blocks(self, num_blocks: int) -> tuple[list[int], list[int]]:
        """Takes `num_blocks` blocks from the table that the window has passed: the useful ones, and the others."""
        passed = self.block_ids[:num_blocks]
        indices = range(self.num_passed_blocks, self.num_passed_blocks + num_blocks)
        is_useful = [any(i in useful for useful in self.useful) for i in indices]
        del self.block_ids[:num_blocks]
        self.num_passed_blocks += num_blocks
        return list(compress(passed, is_useful)), list(compress(passed, map(not_, is_useful)))

    @property
    def writable(self) -> list[int]:
        """Its blocks that may still be written."""
        return self.block_ids[max(self.num_full_blocks - self.num_passed_blocks, 0) :]

    def full_table(self) -> list[int]:
        """The block table for kernels, with the null block behind the window."""
        return [NULL_BLOCK_ID] * self.num_passed_blocks + self.block_ids


def interleave(tables: Sequence[Sequence[int]]) -> list[int]:
    """One list of block ids: for each block of tokens the id of every group, group after group."""
    return list(tables[0]) if len(tables) == 1 else [block_id for ids in zip(*tables, strict=True) for block_id in ids]


def separate(block_ids: Sequence[int], num_groups: int) -> list[list[int]]:
    """The inverse of `interleave`: the block ids of each group."""
    return [list(block_ids[number::num_groups]) for number in range(num_groups)]


def first_needed_blocks(groups: Sequence[KVCacheGroup], num_blocks: int, block_size: int) -> list[int]:
    """The first of `num_blocks` blocks that each group needs to go on: at least the last, which tells the prefix."""
    last = max(num_blocks - 1, 0)
    return [min(group.first_needed_block(num_blocks * block_size, block_size), last) for group in groups]


def longest_common(
    groups: Sequence[KVCacheGroup], by_group: Sequence[Sequence[int | None]], block_size: int
) -> list[list[int]]:
    """The blocks of the longest prefix of which every group has what it needs, with null blocks for what it does not.

    `by_group`: The blocks of one prefix in each group; None where one is lost.
    """
    num_blocks = len(by_group[0])
    last_missing = [[-1] for _ in by_group]  # by number of blocks: the last of them that is not there
    for missing, block_ids in zip(last_missing, by_group, strict=True):
        for number, block_id in enumerate(block_ids):
            missing.append(number if block_id is None else missing[-1])
    while num_blocks and any(
        missing[num_blocks] >= first
        for missing, first in zip(last_missing, first_needed_blocks(groups, num_blocks, block_size), strict=True)
    ):
        num_blocks -= 1
    return [
        [NULL_BLOCK_ID if i < first else block_ids[i] or NULL_BLOCK_ID for i in range(num_blocks)]
        for first, block_ids in zip(first_needed_blocks(groups, num_blocks, block_size), by_group, strict=True)
    ]


def check_computed(
    groups: Sequence[KVCacheGroup], leader: int, computed: Sequence[Sequence[int]], block_size: int, pool: BlockPool
) -> None:
    """Refuses what is no cached prefix: blocks of each group, with null blocks where a window has passed alone.

    `leader`: The group whose blocks tell the prefix.

    Raises:
        ValueError: They are not what a lookup gives.
    """
    num_blocks = len(computed[0])
    if any(len(block_ids) != num_blocks for block_ids in computed):
        raise ValueError("computed_block_ids must have as many blocks for each group")
    for block_ids, first in zip(computed, first_needed_blocks(groups, num_blocks, block_size), strict=True):
        if any((block_id == NULL_BLOCK_ID) != (i < first) for i, block_id in enumerate(block_ids)):
            raise ValueError("computed_block_ids must be null blocks where the window has passed, and nowhere else")
    block_ids = [block_id for group in computed for block_id in group if block_id != NULL_BLOCK_ID]
    leading = [block_id for block_id in computed[leader] if block_id != NULL_BLOCK_ID]
    is_chain = pool.prefix_index.is_chain(leading, is_whole=len(leading) == num_blocks)
    if not (is_chain and pool.are_findable(block_ids)):
        raise ValueError("computed_block_ids must be the blocks of a prefix, from get_computed_blocks")


def useful_blocks(
    groups: Sequence[KVCacheGroup], leader: int, num_found_blocks: int, ends: Sequence[int], block_size: int
) -> list[list[range]]:
    """For each group the blocks that lookups are likely to want after its window has passed them.

    Those that a lookup has found, and those that a prefix of as many blocks as one of `ends` needs. All prefixes hang
    on the leader's blocks.
    """
    useful = [[range(num_found_blocks)] for _ in groups]
    for end in ends:
        for ranges, first in zip(useful, first_needed_blocks(groups, end, block_size), strict=True):
            ranges.append(range(first, end))
    useful[leader] = [range(NEVER)]
    return useful


def check_groups(groups: Sequence[KVCacheGroup], num_reserved_blocks: int) -> None:
    """Refuses groups that make no model, and a pool without a null block.

    Raises:
        ValueError: The text names the argument.
    """
    names = {group.name for group in groups}
    if not groups or len(names) != len(groups) or len(groups) > 255:
        raise ValueError("groups must be 1 to 255 groups with different names")
    for group in groups:
        if group.sliding_window is not None:
            check_integer(f"sliding_window of group {group.name!r}", group.sliding_window, 1)
    if num_reserved_blocks < 1:
        raise ValueError(f"num_reserved_blocks must be at least 1, for the null block, got {num_reserved_blocks}")
