"""Block tables: the blocks of a request, and how far others can find them."""

from __future__ import annotations

from itertools import compress
from operator import not_

from llmstack_kv_cache.prefix_index import ROOT
from llmstack_kv_cache.session_turns import Segment


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


class BlockTable(Segment):
    """The blocks of one request in one group of layers; block i holds tokens [i * block_size, (i + 1) * block_size).

    Attributes:
        salt: The prefixes are shared with requests of the same salt only.
        num_blocks: The length of the table. Leading blocks that a window has passed count, and are not in `block_ids`.
        num_full_blocks: Leading blocks that are no longer written, since others may read them.
        num_cached_blocks: Leading blocks that need no further look: findable themselves, or copies of findable ones.
        copies: The copies among them.
        prefix: The prefix that ends with the last of them, to which the next one is chained.
        useful: Indices of blocks that lookups are likely to want, also when a window has passed them.
        companions: The tables of the request in the other groups, in their order.
    """

    __slots__ = (
        "companions", "copies", "num_blocks", "num_cached_blocks", "num_full_blocks", "prefix", "salt", "useful",
    )  # fmt: skip

    def __init__(self, salt: str, block_ids: list[int], num_blocks: int, useful: tuple[range, ...] = ()) -> None:
        """A table that begins with `num_blocks` full blocks, of which those are left that no window has passed."""
        self.block_ids = block_ids  # without a call of `super()`: every request begins here
        self.num_free = 0
        self.turn = None
        self.salt = salt
        self.num_blocks = self.num_full_blocks = num_blocks
        self.num_cached_blocks = 0
        self.copies: list[int] = []
        self.prefix = ROOT
        self.useful = useful
        self.companions: tuple[BlockTable, ...] = ()

    @property
    def num_passed_blocks(self) -> int:
        """Leading blocks that a window has passed."""
        return self.num_blocks - len(self.block_ids)

    @property
    def writable(self) -> list[int]:
        """Its blocks that may still be written."""
        return self.block_ids[max(self.num_full_blocks - self.num_passed_blocks, 0) :]

    def pass_blocks(self, num_blocks: int) -> tuple[list[int], list[int]]:
        """Takes `num_blocks` blocks from the table that a window has passed: the useful ones, and the others."""
        indices = range(self.num_passed_blocks, self.num_passed_blocks + num_blocks)
        is_useful = [any(i in useful for useful in self.useful) for i in indices]
        passed = self.block_ids[:num_blocks]
        del self.block_ids[:num_blocks]
        return list(compress(passed, is_useful)), list(compress(passed, map(not_, is_useful)))

    def fork(self, num_full_blocks: int) -> BlockTable:
        """A table that shares the first `num_full_blocks` blocks of this one, which both then only read."""
        child = BlockTable(
            self.salt, self.block_ids[: num_full_blocks - self.num_passed_blocks], num_full_blocks, self.useful
        )
        self.num_full_blocks = max(self.num_full_blocks, num_full_blocks)
        # The prefix is known of the last cached block only; a child that begins before it looks its blocks up again.
        if self.num_cached_blocks <= num_full_blocks:
            child.num_cached_blocks, child.prefix = self.num_cached_blocks, self.prefix
            child.copies = self.copies.copy()
        return child
