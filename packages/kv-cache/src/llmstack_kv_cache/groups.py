"""Groups of layers with equal windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmstack_kv_cache.block import check_integer, num_blocks_for

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

    def first_of_prefix(self, num_blocks: int, block_size: int) -> int:
        """The first of `num_blocks` blocks that are needed to go on: at least the last, which tells the prefix."""
        return min(self.first_needed_block(num_blocks * block_size, block_size), max(num_blocks - 1, 0))

    def next_passed_token(self, num_tokens: int, block_size: int) -> int:
        """The number of tokens with which the window passes another block than it has with `num_tokens`."""
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


def leader_of(sliding_windows: Sequence[int | None]) -> int:
    """The group whose blocks tell the prefixes: the first without a window, or the first of all."""
    return next((number for number, window in enumerate(sliding_windows) if window is None), 0)


def interleave(tables: Sequence[Sequence[int]]) -> list[int]:
    """One list of block ids: for each block of tokens the id of every group, group after group."""
    return list(tables[0]) if len(tables) == 1 else [block_id for ids in zip(*tables, strict=True) for block_id in ids]


def separate(block_ids: Sequence[int], num_groups: int) -> list[list[int]]:
    """The inverse of `interleave`: the block ids of each group."""
    return [list(block_ids[number::num_groups]) for number in range(num_groups)]


def check_groups(groups: Sequence[KVCacheGroup], num_reserved_blocks: int) -> None:
    """Refuses groups that make no model, and a pool without a null block where there is more than full attention.

    Raises:
        ValueError: The text names the argument.
    """
    names = {group.name for group in groups}
    if not groups or len(names) != len(groups) or len(groups) > 255:
        raise ValueError("groups must be 1 to 255 groups with different names")
    for group in groups:
        if group.sliding_window is not None:
            check_integer(f"sliding_window of group {group.name!r}", group.sliding_window, 1)
    if num_reserved_blocks < 1 and (len(groups) > 1 or groups[0].sliding_window is not None):
        raise ValueError(f"num_reserved_blocks must be at least 1, for the null block, got {num_reserved_blocks}")
