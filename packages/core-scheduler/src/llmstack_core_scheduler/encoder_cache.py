"""The room for encoded items: which are kept, and which go first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from llmstack_core_scheduler.request import Rank

_NEVER: Final = 0
"""Number of no step."""


class Encoded:
    """An item that is encoded, or that has been begun.

    Attributes:
        num_tokens: Its vectors. It takes room for all of them from its beginning on.
        num_layers: Layers of its encoder, slices counted.
        num_units: Units of each of these layers.
        num_done: Layers that have run, or will have once the steps already scheduled have run.
        last_step: The last step that needed or encoded it; it is not evicted in the same one.
    """

    __slots__ = ("last_step", "num_done", "num_layers", "num_tokens", "num_units")

    def __init__(self, num_tokens: int, num_layers: int, num_units: int, num_done: int = 0) -> None:
        self.num_tokens = num_tokens
        self.num_layers = num_layers
        self.num_units = num_units
        self.num_done = num_done
        self.last_step = _NEVER

    @property
    def is_ready(self) -> bool:
        """Whether its vectors exist for the rows of the step that is being made."""
        return self.num_done == self.num_layers


class EncoderCache:
    """Items by number, within a number of vectors.

    What a running request has still to compute is evicted last, and only for a request that goes before it; of the
    rest, what was used least recently goes first.

    Attributes:
        num_free_tokens: Vectors that there is room for.
        num_evictions: Counter of items that were evicted.
        num_repeats: Counter of those that a running request still needed.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = self.num_free_tokens = num_tokens
        self.num_evictions = self.num_repeats = 0
        self._entries: dict[int, Encoded] = {}  # that used last is the last

    def __iter__(self) -> Iterator[tuple[int, Encoded]]:
        return iter(self._entries.items())

    def get(self, number: int) -> Encoded | None:
        """An item by its number; None if it is not there."""
        return self._entries.get(number)

    def use(self, number: int, step: int) -> None:
        """An item is needed in a step."""
        entry = self._entries[number] = self._entries.pop(number)
        entry.last_step = step

    def add(self, number: int, entry: Encoded) -> None:
        """Begins an item, for which there is room."""
        self._entries[number] = entry
        self.num_free_tokens -= entry.num_tokens

    def remove(self, number: int) -> bool:
        """Drops an item; False if it is not there."""
        entry = self._entries.pop(number, None)
        if entry is None:
            return False
        self.num_free_tokens += entry.num_tokens
        return True

    def make_room(self, num_tokens: int, rank: Rank, step: int, needed: Mapping[int, Rank]) -> list[int] | None:
        """Evicts items until there is room for so many vectors; their numbers, or None, with nothing changed.

        Args:
            num_tokens: The vectors.
            rank: Of the request that needs the room.
            step: The step that is being made.
            needed: The items that running requests have still to compute, with the first of their ranks.
        """
        missing = num_tokens - self.num_free_tokens
        victims: list[int] = []
        for number in self._victims(rank, step, needed) if missing > 0 else ():
            victims.append(number)
            missing -= self._entries[number].num_tokens
            if missing <= 0:
                break
        if missing > 0:
            return None
        for number in victims:
            self.remove(number)
            self.num_repeats += number in needed
        self.num_evictions += len(victims)
        return victims

    def _victims(self, rank: Rank, step: int, needed: Mapping[int, Rank]) -> Iterator[int]:
        others = []
        for number, entry in self._entries.items():
            if entry.last_step == step:
                continue
            if number not in needed:
                yield number
            elif needed[number] >= rank:  # of itself, what it comes to later
                others.append(number)
        yield from sorted(others, key=lambda number: needed[number], reverse=True)
