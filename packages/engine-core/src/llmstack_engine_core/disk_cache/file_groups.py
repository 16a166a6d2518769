"""Which groups of layers have their blocks in which files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from llmstack_kv_cache.groups import NULL_BLOCK_ID, KVCacheGroup, leader_of


class Extent(NamedTuple):
    """Blocks `start` to `end` of a text, in one file.

    Attributes:
        window: That of the groups whose blocks they are; 0 for the groups with blocks from the first token on.
    """

    start: int
    end: int
    window: int = 0

    @property
    def num_blocks(self) -> int:
        """The number of blocks of each group."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class FileGroups:
    """The groups of layers with block tables of their own, by files.

    Groups with equal windows share files. To go on from a prefix takes of them the blocks that the window still sees.
    The group whose blocks tell the prefixes has all its blocks on disk, whether or not it has a window, as in memory.

    Attributes:
        num_groups: Block ids in a list for each block of tokens.
        window_to_numbers: The numbers of the groups that share files, by their window; 0 has the leader.
    """

    num_groups: int
    window_to_numbers: dict[int, list[int]]

    @classmethod
    def of(cls, sliding_windows: Sequence[int | None]) -> Self:
        """`sliding_windows`: Those of the groups, in their order; one without a window where all share a table."""
        leader, window_to_numbers = leader_of(sliding_windows), dict[int, list[int]]()
        for number, window in enumerate(sliding_windows):
            window_to_numbers.setdefault(0 if number == leader else window or 0, []).append(number)
        return cls(len(sliding_windows), window_to_numbers)

    @property
    def windows(self) -> list[int]:
        """The windows of groups with files of their own."""
        return sorted(window for window in self.window_to_numbers if window)

    @property
    def most_in_a_file(self) -> int:
        """The most groups that share files."""
        return max(map(len, self.window_to_numbers.values()))

    def num_entries(self, extent: Extent) -> int:
        """The number of storage blocks in a file."""
        return extent.num_blocks * len(self.window_to_numbers[extent.window])

    def entries(self, values: Sequence[int], extent: Extent) -> list[int]:
        """The part of `values` that belongs to a file; they have one for each block of a text and group."""
        numbers = self.window_to_numbers[extent.window]
        return [values[i * self.num_groups + number] for i in range(extent.start, extent.end) for number in numbers]

    def places(self, block_ids: Sequence[int], first: int, extent: Extent) -> list[int]:
        """The storage blocks that take the last ones of a file; `block_ids` belong to a text from block `first` on."""
        start = max(extent.start, first)
        if start >= extent.end:
            return []
        places = self.entries(block_ids, Extent(start - first, extent.end - first, extent.window))
        return [one for one in places if one != NULL_BLOCK_ID] if extent.window else places


def first_needed(window: int, end: int, block_size: int) -> int:
    """The first of `end` blocks that groups with this window need to go on."""
    return KVCacheGroup("", window or None).first_of_prefix(end, block_size)


ONE_GROUP: Final = FileGroups.of([None])
