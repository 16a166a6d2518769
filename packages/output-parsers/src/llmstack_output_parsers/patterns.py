"""Regular expressions whose work is counted, by no clock.

A checkpoint has the pattern, and a model writes the text. Backtracking may take exponentially many steps for the two.
Here a text has as many steps as follow from its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from llmstack_output_parsers.pattern_steps import Matching, Text, Work
from llmstack_output_parsers.pattern_syntax import Compiler


class Found(NamedTuple):
    """A match: where it lies, and the texts of the named groups that took part."""

    start: int
    end: int
    groups: Mapping[str, str]


class Pattern:
    """A pattern in the syntax of `re`, in which a dot stands for any character.

    It has no lookbehind, atomic group, reference to a group, or flag.

    Attributes:
        groups: The numbers of its named groups.
    """

    def __init__(self, pattern: str) -> None:
        """Compiles a pattern.

        Raises:
            PatternError: It is malformed, too large or not supported.
        """
        compiler = Compiler(pattern)
        self.groups: Mapping[str, int] = compiler.groups
        self._program, self._num_slots = compiler.program, compiler.num_slots
        first = self._program[0]
        self._start = first.wanted if isinstance(first, Text) else ""

    def match(self, text: str, start: int, work: Work) -> tuple[Found | None, bool]:
        """The match that begins at `start`, and whether no text behind this one could change that.

        Raises:
            WorkLimitError: There are too few steps left.
        """
        matching = Matching(self._program, self._num_slots, text, work)
        slots = matching.run(0, start)
        if slots is None:
            return None, matching.is_decided
        places = {name: slots[2 * number : 2 * number + 2] for name, number in self.groups.items()}
        groups = {name: text[first:end] for name, (first, end) in places.items() if end >= 0}
        return Found(start, slots[1], groups), matching.is_decided

    def find_all(self, text: str) -> Iterator[Found]:
        """The matches that do not overlap, from the first on; raises as `match`."""
        work, start = Work(len(text)), 0
        while (start := text.find(self._start, start)) >= 0:
            found, _ = self.match(text, start, work)
            start += 1
            if found is not None:
                yield found
                start = max(start, found.end)


@lru_cache(maxsize=64)
def compiled(pattern: str) -> Pattern:
    """The pattern, compiled once; raises as `Pattern`."""
    return Pattern(pattern)
