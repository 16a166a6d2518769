"""Counters of the tokens of prompts that are computed, by cause."""

from __future__ import annotations

from typing import Final

OF_DISK_MISS: Final = {
    "costly": "disk_costly", "late": "disk_late", "damaged": "disk_failed", "foreign": "disk_failed",
    "unreadable": "disk_failed", "evicted": "disk_no_room", "no_room": "disk_no_room",
}  # fmt: skip
"""The cause where a disk had the tokens and did not give them, by what was in the way."""

CAUSES: Final = (
    "new", "block_end", "evicted", "preempted", "released", "reset", "other_adapter", "no_state", "not_looked_up",
    *dict.fromkeys(OF_DISK_MISS.values()),
)  # fmt: skip
"""Why tokens are computed: `new` ones for the first time, as far as is known; the others were computed before."""


class ComputedTokens:
    """Counters by cause, in the order of `CAUSES`."""

    def __init__(self) -> None:
        self.counts = [0] * len(CAUSES)

    def add(self, cause: str, num_tokens: int) -> None:
        """Counts tokens; none below 0."""
        if num_tokens > 0:
            self.counts[_PLACES[cause]] += num_tokens

    @property
    def num_again(self) -> int:
        """The tokens that were computed before, in whole blocks."""
        return sum(self.counts[len(_NOT_AGAIN) :])


_PLACES: Final = {cause: place for place, cause in enumerate(CAUSES)}
_NOT_AGAIN: Final = CAUSES[:2]
