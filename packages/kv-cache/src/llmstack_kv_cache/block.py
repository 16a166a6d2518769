"""What one request holds: its blocks in order, and how far they are findable by others."""

from __future__ import annotations

ROOT_IDENTITY = 0
"""Identity of the empty prefix, parent of every first block; contents are numbered from 1."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens fill or begin to fill."""
    return -(-num_tokens // block_size)


class BlockTable:
    """The blocks of one request.

    Attributes:
        block_ids: Block i holds tokens [i * block_size, (i + 1) * block_size).
        salt: The prefixes are shared with requests of the same salt only.
        num_cached_blocks: Leading blocks that need no further look: findable themselves, or copies of findable ones.
        identity: Content identity of the last of them, to which the next one is chained.
    """

    __slots__ = ("block_ids", "identity", "num_cached_blocks", "salt")

    def __init__(self, salt: str) -> None:
        self.block_ids: list[int] = []
        self.salt = salt
        self.num_cached_blocks = 0
        self.identity = ROOT_IDENTITY
