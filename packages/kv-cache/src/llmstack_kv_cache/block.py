"""Block tables: the blocks of a request, and how far others can find them."""

from __future__ import annotations

from llmstack_kv_cache.prefix_index import ROOT


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens fill or begin to fill."""
    return -(-num_tokens // block_size)


def check_integer(name: str, value: int, least: int) -> None:
    """Refuses what is no integer of at least `least`.

    Raises:
        ValueError: The text names the argument.
    """
    if not hasattr(value, "__index__"):  # numpy's integers are fine
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_sizes(
    num_blocks: int,
    block_size: int,
    num_host_blocks: int,
    num_reserved_blocks: int,
    watermark: float,
    max_events: int,
) -> None:
    """Refuses sizes that make no cache.

    Raises:
        ValueError: The text names the argument.
    """
    for name, size, least in (
        ("num_blocks", num_blocks, 1),
        ("block_size", block_size, 1),
        ("num_host_blocks", num_host_blocks, 0),
        ("num_reserved_blocks", num_reserved_blocks, 0),
        ("max_events", max_events, 0),
    ):
        check_integer(name, size, least)
    if num_reserved_blocks >= num_blocks:
        raise ValueError(f"num_reserved_blocks {num_reserved_blocks} leaves none of num_blocks {num_blocks}")
    if not hasattr(watermark, "__float__") or not 0.0 <= watermark < 1.0:
        raise ValueError(f"watermark must be in [0, 1), got {watermark!r}")


class Segment:
    """Blocks that are held, and later freed, together.

    Attributes:
        block_ids: While it is held, its blocks; once it is free, those of them that were free at some time.
        num_free: Of these, the blocks that are free as part of this segment; 0 while it is held.
    """

    __slots__ = ("block_ids", "num_free")

    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = block_ids
        self.num_free = 0


class BlockTable(Segment):
    """The blocks of one request; block i holds tokens [i * block_size, (i + 1) * block_size).

    Attributes:
        salt: The prefixes are shared with requests of the same salt only.
        num_full_blocks: Leading blocks that are no longer written, since others may read them.
        num_cached_blocks: Leading blocks that need no further look: findable themselves, or copies of findable ones.
        copies: The copies among them.
        prefix: The prefix that ends with the last of them, to which the next one is chained.
    """

    __slots__ = ("copies", "num_cached_blocks", "num_full_blocks", "prefix", "salt")

    def __init__(self, salt: str) -> None:
        super().__init__([])
        self.salt = salt
        self.num_full_blocks = 0
        self.num_cached_blocks = 0
        self.copies: list[int] = []
        self.prefix = ROOT

    @property
    def num_blocks(self) -> int:
        """How many blocks of tokens it reaches over."""
        return len(self.block_ids)

    @property
    def writable(self) -> list[int]:
        """Its blocks that may still be written."""
        return self.block_ids[self.num_full_blocks :]

    @property
    def unfindable(self) -> list[int]:
        """Its blocks that no lookup finds, unless the blocks have been shared."""
        return self.copies + self.block_ids[self.num_cached_blocks :]

    def share_with(self, child: BlockTable, num_full_blocks: int) -> None:
        """Prepares an empty table to share this one's first `num_full_blocks` blocks, which both then only read."""
        child.num_full_blocks = num_full_blocks
        self.num_full_blocks = max(self.num_full_blocks, num_full_blocks)
        # The prefix is known of the last cached block only; a child that begins before it looks its blocks up again.
        if self.num_cached_blocks <= num_full_blocks:
            child.num_cached_blocks, child.prefix = self.num_cached_blocks, self.prefix
            child.copies = self.copies.copy()
