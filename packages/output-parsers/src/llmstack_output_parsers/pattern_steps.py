"""Steps of a match by backtracking, which are counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

MIN_STEPS: Final = 20_000
STEPS_PER_CHAR: Final = 8
_CHARS_PER_STEP: Final = 4
"""Of a run of characters, each of which takes less time than an instruction."""
_CHARS_PER_SEARCH: Final = 4096
"""Of those that a text is looked for in."""
_FRESH: Final = -1
Accepts = Callable[[str], bool]
State = tuple[int, int, tuple[int, ...], int]
"""The number of an instruction, the place in the text, the ends of groups, and the length of a run to try."""


def anything(_: str) -> bool:
    """The test that each character passes."""
    return True


class WorkLimitError(ValueError):
    """A text would take more steps than it has."""


class Work:
    """The steps that are left for a text.

    Attributes:
        num_left: How many.
    """

    def __init__(self, num_chars: int) -> None:
        """`num_chars`: Of the text."""
        self.num_left = MIN_STEPS + STEPS_PER_CHAR * num_chars

    def spend(self, num_steps: int) -> None:
        """Counts steps.

        Raises:
            WorkLimitError: There are too few left.
        """
        self.num_left -= num_steps
        if self.num_left < 0:
            raise WorkLimitError("a pattern takes too many steps on this text")


class Matching:
    """One attempt at a match.

    Attributes:
        text: The text.
        rest: What is left to be tried, the next one last.
        is_decided: Whether nothing that was tried so far reached the end of the text.
    """

    def __init__(self, program: Sequence[Instruction], num_slots: int, text: str, work: Work) -> None:
        self.text, self.work = text, work
        self.rest: list[State] = []
        self.is_decided = True
        self._program, self._num_slots = program, num_slots

    def run(self, number: int, start: int) -> tuple[int, ...] | None:
        """The ends of the groups from an instruction on, of which group 0 is the match; None without a match."""
        before, self.rest = self.rest, [(number, start, (start, *(-1,) * (self._num_slots - 1)), _FRESH)]
        try:
            while self.rest:
                state: State | None = self.rest.pop()
                while state is not None:
                    self.work.spend(1)
                    instruction = self._program[state[0]]
                    if isinstance(instruction, Match):
                        return (start, state[1], *state[2][2:])
                    state = instruction.step(self, state)
            return None
        finally:
            self.rest = before


class Instruction(ABC):
    """One instruction of a pattern."""

    @abstractmethod
    def step(self, matching: Matching, state: State) -> State | None:
        """The next state of this attempt, or None where the text does not fit; other attempts are left in `rest`."""


@dataclass(frozen=True, slots=True)
class Text(Instruction):
    """The characters of a text, one after the other."""

    wanted: str

    def step(self, matching: Matching, state: State) -> State | None:
        number, place, slots, _ = state
        text, wanted = matching.text, self.wanted
        if text.startswith(wanted, place):
            return number + 1, place + len(wanted), slots, _FRESH
        if len(text) - place < len(wanted) and wanted.startswith(text[place:]):
            matching.is_decided = False
        return None


@dataclass(frozen=True, slots=True)
class Greedy(Instruction):
    """The longest run of characters that fit, or a shorter one.

    `is_final`: Nothing else can follow a shorter one.
    """

    accepts: Accepts
    low: int = 1
    high: int = 1
    is_final: bool = False

    def step(self, matching: Matching, state: State) -> State | None:
        number, place, slots, count = state
        if count == _FRESH:
            count = self._measure(matching, place)
            if count < self.low:
                return None
        if count > self.low and not self.is_final:
            matching.rest.append((number, place, slots, count - 1))
        return number + 1, place + count, slots, _FRESH

    def _measure(self, matching: Matching, place: int) -> int:
        text, last, accepts = matching.text, place, self.accepts
        end = min(place + self.high, len(text))
        while last < end and accepts(text[last]):
            last += 1
        matching.work.spend((last - place) // _CHARS_PER_STEP)
        if last == len(text) and last - place < self.high:
            matching.is_decided = False
        return last - place


class Ending(NamedTuple):
    """The text behind a lazy run, and what may be between them: a run of other characters than its first one."""

    text: str
    between: Accepts | None


@dataclass(frozen=True, slots=True)
class Lazy(Instruction):
    """The shortest run of characters that fit, or a longer one.

    `ending`: What follows it; None where that is not known, and each length is tried.
    """

    accepts: Accepts
    low: int
    high: int
    ending: Ending | None = None

    def step(self, matching: Matching, state: State) -> State | None:
        number, place, slots, count = state
        known = max(count - 1, 0)
        count = max(count, self.low)
        if place + count > len(matching.text):
            matching.is_decided = False
            return None
        if self.ending is not None:
            count = self._next_end(matching, place + count, self.ending) - place
        if count < 0 or count > self.high or not self._all_fit(matching, place + known, place + count):
            return None
        if count < self.high:
            matching.rest.append((number, place, slots, count + 1))
        return number + 1, place + count, slots, _FRESH

    def _next_end(self, matching: Matching, start: int, ending: Ending) -> int:
        """The first place from `start` on at which what follows can begin; -1 for none."""
        text, between = matching.text, ending.between
        end = text.find(ending.text, start)
        matching.work.spend(((end if end >= 0 else len(text)) - start) // _CHARS_PER_SEARCH)
        if end < 0:
            matching.is_decided = False
            return -1
        first = end
        while between is not None and first > start and between(text[first - 1]):
            first -= 1
        matching.work.spend((end - first) // _CHARS_PER_STEP)
        return first

    def _all_fit(self, matching: Matching, start: int, end: int) -> bool:
        if self.accepts is anything:
            return True
        matching.work.spend((end - start) // _CHARS_PER_STEP)
        return all(self.accepts(char) for char in matching.text[start:end])


@dataclass(frozen=True, slots=True)
class Split(Instruction):
    """One instruction, or else another."""

    preferred: int
    other: int

    def step(self, matching: Matching, state: State) -> State | None:
        _, place, slots, _ = state
        matching.rest.append((self.other, place, slots, _FRESH))
        return self.preferred, place, slots, _FRESH


@dataclass(frozen=True, slots=True)
class Jump(Instruction):
    """The next instruction is another one than that behind it."""

    target: int

    def step(self, matching: Matching, state: State) -> State | None:
        return self.target, *state[1:]


@dataclass(frozen=True, slots=True)
class Save(Instruction):
    """Notes the place in a slot."""

    slot: int

    def step(self, matching: Matching, state: State) -> State | None:
        number, place, slots, count = state
        return number + 1, place, (*slots[: self.slot], place, *slots[self.slot + 1 :]), count


@dataclass(frozen=True, slots=True)
class Moved(Instruction):
    """Anything but the place in a slot: an empty repetition ends."""

    slot: int

    def step(self, matching: Matching, state: State) -> State | None:
        number, place, slots, count = state
        return None if slots[self.slot] == place else (number + 1, place, slots, count)


@dataclass(frozen=True, slots=True)
class At(Instruction):
    """A place, such as the beginning of the text."""

    fits: Callable[[str, int], bool]

    def step(self, matching: Matching, state: State) -> State | None:
        number, place, slots, count = state
        if place >= len(matching.text) - 1:
            matching.is_decided = False
        return (number + 1, place, slots, count) if self.fits(matching.text, place) else None


@dataclass(frozen=True, slots=True)
class Look(Instruction):
    """The text ahead fits the instructions up to `target`, or does not."""

    target: int
    is_negated: bool

    def step(self, matching: Matching, state: State) -> State | None:
        number, place, slots, count = state
        is_match = matching.run(number + 1, place) is not None
        return None if is_match == self.is_negated else (self.target, place, slots, count)


@dataclass(frozen=True, slots=True)
class Match(Instruction):
    """The end of a match."""

    def step(self, matching: Matching, state: State) -> State | None:
        return None
