"""Groups of layers that look equally far back, and what one request holds in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmstack_kv_cache.block import BlockTable

NULL_BLOCK_ID = 0
"""Stands in a block table where a window has passed: a valid block, which nobody is ever given."""


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


class GroupTable(BlockTable):
    """The blocks of one request in one group.

    Attributes:
        num_passed_blocks: Leading blocks that the window has passed; `block_ids` begins after them.
    """

    __slots__ = ("num_passed_blocks",)

    def __init__(self, salt: str, num_passed_blocks: int = 0) -> None:
        super().__init__(salt)
        self.num_passed_blocks = num_passed_blocks

    @property
    def num_blocks(self) -> int:
        """How many blocks of tokens it reaches over."""
        return self.num_passed_blocks + len(self.block_ids)

    @property
    def writable(self) -> list[int]:
        """Its blocks that may still be written."""
        return self.block_ids[max(self.num_full_blocks - self.num_passed_blocks, 0) :]

    def full_table(self) -> list[int]:
        """Its blocks as a kernel wants them, the null block where the window has passed."""
        return [NULL_BLOCK_ID] * self.num_passed_blocks + self.block_ids


def check_groups(groups: Sequence[KVCacheGroup], num_reserved_blocks: int) -> None:
    """Refuses groups that make no model, and a pool without a null block.

    Raises:
        ValueError: The text names the argument.
    """
    names = {group.name for group in groups}
    if not groups or len(names) != len(groups) or len(groups) > 255:
        raise ValueError("groups must be 1 to 255 groups with different names")
    for group in groups:
        if group.sliding_window is not None and group.sliding_window < 1:
            raise ValueError(f"sliding_window of group {group.name!r} must be at least 1, got {group.sliding_window}")
    if num_reserved_blocks < 1:
        raise ValueError(f"num_reserved_blocks must be at least 1, for the null block, got {num_reserved_blocks}")
