"""What has parts gives back what they have, also those that come later."""

from __future__ import annotations

import asyncio

import pytest

from llmstack_types.lifecycle import AsyncClosing, ClosingParts


class Part(AsyncClosing):
    """Counts how often it was shut down, and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_shutdowns = 0
        self._error = error

    async def shutdown(self) -> None:
        self.num_shutdowns += 1
        if self._error is not None:
            raise self._error


def test_all_parts_are_shut_down_each_time() -> None:
    first, later = Part(), Part()
    whole = ClosingParts(first)
    whole.closing.append(later)
    for _ in range(2):
        asyncio.run(whole.shutdown())
    assert (first.num_shutdowns, later.num_shutdowns) == (2, 2)


def test_a_part_that_fails_keeps_no_other_from_its_shutdown() -> None:
    bad, good = Part(OSError("gone")), Part()
    with pytest.raises(OSError, match="gone"):
        asyncio.run(ClosingParts(bad, good).shutdown())
    assert good.num_shutdowns == 1


def test_without_parts_there_is_nothing_to_give_back() -> None:
    asyncio.run(ClosingParts().shutdown())
