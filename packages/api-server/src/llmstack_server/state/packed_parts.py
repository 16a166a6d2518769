"""The parts of one answer in memory, compressed where room is needed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final

import msgpack  # type: ignore[import-untyped]  # it ships no types

# What a part costs besides its bytes, and what a block of packed ones does.
PART_OVERHEAD: Final = 48
# A part that is smaller is counted together with later ones, until these are so many bytes.
MAX_FRESH_PART: Final = 384
MAX_FRESH_BYTES: Final = 16 * MAX_FRESH_PART
# Fewer bytes are not worth it.
MIN_PACKED_BYTES: Final = 2 * MAX_FRESH_BYTES
# To read one part, its block is unpacked: 64 KiB of events, in 0.2 ms.
NUM_BLOCK_PARTS: Final = 256
# Longer ones, on average, are no events of one token. To pack them would take the event loop for long.
MAX_PACKED_PART: Final = 4096
# Further levels take twice the time for a tenth of the bytes.
_LEVEL: Final = 1


def packed(parts: Sequence[bytes]) -> bytes:
    """Parts in few bytes: events of one stream differ by little more than the text of a token."""
    return zlib.compress(msgpack.packb(parts), _LEVEL)


def unpacked(data: bytes) -> list[bytes]:
    """The parts that were packed.

    Raises:
        ValueError: The data are no such parts.
    """
    try:
        found = msgpack.unpackb(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, list):
        raise ValueError("no list of parts")
    return found


class PackedParts:
    """Parts in their order. They are packed where room is needed: most answers end before.

    Attributes:
        fresh: The last parts, which are not packed yet.
        num_packed: The parts before them, dropped ones included.
        num_dropped: Parts that were dropped at the front.
        num_fresh_bytes: The size of the parts that are not packed.
    """

    def __init__(self) -> None:
        self.fresh: list[bytes] = []
        self.num_packed = self.num_dropped = 0
        self.num_fresh_bytes = self._num_packed_bytes = 0
        self._blocks: list[tuple[int, bytes]] = []  # each with the number of the parts up to its end

    def __len__(self) -> int:
        return self.num_packed + len(self.fresh)

    @property
    def num_bytes(self) -> int:
        """The size of the parts that are kept."""
        return self._num_packed_bytes + self.num_fresh_bytes

    def append(self, part: bytes) -> None:
        """Adds a part as the last one."""
        self.fresh.append(part)
        self.num_fresh_bytes += len(part) + PART_OVERHEAD

    def after(self, position: int, max_bytes: int) -> list[bytes]:
        """Parts after the first `position`, until they have `max_bytes` or more; they must not be dropped."""
        found: list[bytes] = []
        num_bytes = 0
        for part in self._from(position):
            found.append(part)
            num_bytes += len(part)
            if num_bytes >= max_bytes:
                break
        return found

    def _from(self, position: int) -> Iterator[bytes]:
        first = self.num_dropped
        for end, block in self._blocks:
            if end > position:
                yield from unpacked(block)[max(position - first, 0) :]
            first = end
        yield from self.fresh[max(position - self.num_packed, 0) :]

    def drop(self, position: int) -> None:
        """Drops the first `position` parts; those of a block together with its last one."""
        while self._blocks and self._blocks[0][0] <= position:
            self.num_dropped, block = self._blocks.pop(0)
            self._num_packed_bytes -= len(block) + PART_OVERHEAD
        dropped = self.fresh[: max(position - self.num_packed, 0)]
        if dropped:
            del self.fresh[: len(dropped)]
            self.num_fresh_bytes -= sum(map(len, dropped)) + PART_OVERHEAD * len(dropped)
            self.num_packed += len(dropped)
            self.num_dropped = self.num_packed

    @property
    def is_worth_packing(self) -> bool:
        """Whether `pack` makes room for further parts."""
        return MIN_PACKED_BYTES <= self.num_fresh_bytes <= MAX_PACKED_PART * len(self.fresh)

    def pack(self) -> None:
        """Packs the last parts, too, unless these are long."""
        fresh = self.fresh
        if self.num_fresh_bytes > MAX_PACKED_PART * len(fresh):
            return
        for start in range(0, len(fresh), NUM_BLOCK_PARTS):
            parts = fresh[start : start + NUM_BLOCK_PARTS]
            self.num_packed += len(parts)
            self._blocks.append((self.num_packed, packed(parts)))
            self._num_packed_bytes += len(self._blocks[-1][1]) + PART_OVERHEAD
        self.fresh, self.num_fresh_bytes = [], 0
