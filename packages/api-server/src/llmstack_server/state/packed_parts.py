"""The events of one stream in memory: common beginnings and ends stored once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

# What an event costs besides its bytes.
EVENT_OVERHEAD = 48
# Fewer bytes in common are not worth it; what has not been found in some events is not looked for any more.
MIN_COMMON_BYTES = 64
MAX_ATTEMPTS = 8
# A part that is smaller is counted together with later ones, until these are so many bytes.
MAX_FRESH_PART = 384
MAX_FRESH_BYTES = 16 * MAX_FRESH_PART


class Packed(NamedTuple):
    """Parts in MessagePack: what most of them begin and end with, the others whole.

    Attributes:
        wholes: The numbers of the parts that are whole, from 0 on.
    """

    prefix: bytes
    suffix: bytes
    wholes: Sequence[int]
    stored: Sequence[bytes]

    def parts(self) -> list[bytes]:
        """All parts as they were."""
        wholes, prefix, suffix = set(self.wholes), self.prefix, self.suffix
        return [
            part if number in wholes else b"%b%b%b" % (prefix, part, suffix) for number, part in enumerate(self.stored)
        ]


class PackedParts:
    """Parts in their order. Most events of a stream differ only by the text of one token.

    They are packed where room is needed: most streams end before, and packing costs as much as sending.

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
        self._stored: list[bytes] = []
        self._whole_numbers: set[int] = set()  # from 0 on, dropped ones included
        self._prefix = self._suffix = b""
        self._min_packed_bytes = 0
        self._last = b""
        self._num_attempts = 0

    def __len__(self) -> int:
        return self.num_packed + len(self.fresh)

    @property
    def num_bytes(self) -> int:
        """The size of the parts that are kept."""
        return self._num_packed_bytes + self.num_fresh_bytes

    def append(self, part: bytes) -> None:
        """Adds a part as the last one."""
        self.fresh.append(part)
        self.num_fresh_bytes += len(part) + EVENT_OVERHEAD

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
        for number in range(position, self.num_packed):
            part = self._stored[number - self.num_dropped]
            is_whole = number in self._whole_numbers
            yield part if is_whole else b"%b%b%b" % (self._prefix, part, self._suffix)
        yield from self.fresh[max(position - self.num_packed, 0) :]

    def packed(self) -> Packed:
        """All parts as a database keeps them; none must be dropped."""
        self.pack()
        return Packed(self._prefix, self._suffix, sorted(self._whole_numbers), tuple(self._stored))

    def drop(self, position: int) -> None:
        """Drops the first `position` parts."""
        self.pack()
        count = min(max(position - self.num_dropped, 0), len(self._stored))
        self._num_packed_bytes -= sum(len(part) + EVENT_OVERHEAD for part in self._stored[:count])
        self._whole_numbers.difference_update(range(self.num_dropped, self.num_dropped + count))
        del self._stored[:count]
        self.num_dropped += count

    def pack(self) -> None:
        """Also stores the last parts without the common beginning and end."""
        fresh, self.fresh, self.num_fresh_bytes = self.fresh, [], 0
        self.num_packed += len(fresh)
        num_before = len(self._stored)
        for index, part in enumerate(fresh):
            if self._prefix:
                self._pack_known(fresh[index:])
                break
            self._keep_whole(part)
        self._num_packed_bytes += sum(map(len, self._stored[num_before:])) + EVENT_OVERHEAD * len(fresh)

    def _pack_known(self, fresh: list[bytes]) -> None:
        prefix, suffix, min_bytes, store = self._prefix, self._suffix, self._min_packed_bytes, self._stored.append
        start, end = len(prefix), -len(suffix) or None
        middles = [part[start:end] for part in fresh]
        # One comparison takes half the time of many. A shorter part would make the left side longer than the right.
        if prefix + (suffix + prefix).join(middles) + suffix == b"".join(fresh):
            self._stored += middles
            return
        for part, middle in zip(fresh, middles, strict=True):
            if part.startswith(prefix) and part.endswith(suffix) and len(part) >= min_bytes:
                store(middle)
            else:
                self._keep_whole(part)

    def _keep_whole(self, part: bytes) -> None:
        """Stores a whole part. Two whole neighbours may have a common beginning and end."""
        if not self._prefix and self._num_attempts < MAX_ATTEMPTS:
            if self._last:
                self._find_common(part)
            self._last = part
        self._whole_numbers.add(self.num_dropped + len(self._stored))
        self._stored.append(part)

    def _find_common(self, part: bytes) -> None:
        self._num_attempts += 1
        prefix = part[: _num_common(self._last, part)]
        rest = min(len(self._last), len(part)) - len(prefix)
        suffix = part[len(part) - min(_num_common(self._last, part, at_end=True), rest) :]
        if len(prefix) + len(suffix) >= MIN_COMMON_BYTES and prefix:
            self._prefix, self._suffix = prefix, suffix
            self._min_packed_bytes = len(prefix) + len(suffix)


def _num_common(first: bytes, second: bytes, *, at_end: bool = False) -> int:
    """The number of equal bytes at the beginning, or at the end: from the first different bit of two integers."""
    size = min(len(first), len(second))
    if at_end:
        first, second = first[len(first) - size :], second[len(second) - size :]
        differing = int.from_bytes(first, "big") ^ int.from_bytes(second, "big")
        return ((differing & -differing).bit_length() - 1) // 8 if differing else size
    differing = int.from_bytes(first[:size], "big") ^ int.from_bytes(second[:size], "big")
    return size - (differing.bit_length() + 7) // 8
