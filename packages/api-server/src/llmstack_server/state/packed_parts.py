"""The events of one stream, with what most of them have in common stored once."""

from __future__ import annotations

# What an event costs besides its bytes.
EVENT_OVERHEAD = 48
# Fewer bytes in common are not worth it; what has not been found in some events is not looked for any more.
MIN_COMMON_BYTES = 64
MAX_ATTEMPTS = 8


class PackedParts:
    """Parts in their order. Most events of a stream differ only by the text of one token.

    Attributes:
        num_bytes: The size of the parts that are kept, as it is counted.
        num_dropped: Parts that were dropped at the front.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_dropped = 0
        self._stored: list[bytes] = []
        self._whole_numbers: set[int] = set()  # from 0 on, dropped ones included
        self._prefix = self._suffix = b""
        self._min_packed_bytes = 0
        self._last = b""
        self._num_attempts = 0

    def __len__(self) -> int:
        """All parts that there were, dropped ones included."""
        return self.num_dropped + len(self._stored)

    def append(self, part: bytes) -> int:
        """Adds a part, without what it has in common with the others; the bytes that it is counted as."""
        prefix, suffix = self._prefix, self._suffix
        if prefix and part.startswith(prefix) and part.endswith(suffix) and len(part) >= self._min_packed_bytes:
            stored = part[len(prefix) : len(part) - len(suffix)]
        else:
            stored = part
            self._keep_whole(part)
        self._stored.append(stored)
        num_bytes = len(stored) + EVENT_OVERHEAD
        self.num_bytes += num_bytes
        return num_bytes

    def after(self, position: int, max_bytes: int) -> list[bytes]:
        """Parts after the first `position`, until they have `max_bytes` or more; they must not be dropped."""
        found: list[bytes] = []
        num_bytes = 0
        for number in range(position, len(self)):
            part = self._stored[number - self.num_dropped]
            if number not in self._whole_numbers:
                part = b"%b%b%b" % (self._prefix, part, self._suffix)
            found.append(part)
            num_bytes += len(part)
            if num_bytes >= max_bytes:
                break
        return found

    def drop(self, position: int) -> None:
        """Drops the first `position` parts."""
        count = min(max(position - self.num_dropped, 0), len(self._stored))
        self.num_bytes -= sum(len(part) + EVENT_OVERHEAD for part in self._stored[:count])
        self._whole_numbers.difference_update(range(self.num_dropped, self.num_dropped + count))
        del self._stored[:count]
        self.num_dropped += count

    def _keep_whole(self, part: bytes) -> None:
        """Notes a part that stays as it is. Two neighbours may show what they have in common."""
        if not self._prefix and self._num_attempts < MAX_ATTEMPTS:
            if self._last:
                self._find_common(part)
            self._last = part
        self._whole_numbers.add(len(self))

    def _find_common(self, part: bytes) -> None:
        self._num_attempts += 1
        prefix = part[: _num_common(self._last, part)]
        rest = min(len(self._last), len(part)) - len(prefix)
        suffix = part[len(part) - min(_num_common(self._last[::-1], part[::-1]), rest) :]
        if len(prefix) + len(suffix) >= MIN_COMMON_BYTES and prefix:
            self._prefix, self._suffix = prefix, suffix
            self._min_packed_bytes = len(prefix) + len(suffix)


def _num_common(first: bytes, second: bytes) -> int:
    """The bytes at the beginning that are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
