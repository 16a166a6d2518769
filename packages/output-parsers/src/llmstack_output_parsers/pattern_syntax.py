"""Instructions of a pattern in the syntax of `re`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from re import _constants as ops  # type: ignore[attr-defined]  # the parser of `re` has no public name
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

from llmstack_output_parsers.pattern_steps import (
    Accepts,
    At,
    Ending,
    Greedy,
    Instruction,
    Jump,
    Lazy,
    Look,
    Match,
    Moved,
    Save,
    Split,
    Text,
    anything,
)

MAX_INSTRUCTIONS: Final = 1000


def _is_of_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _is_boundary(text: str, place: int) -> bool:
    before, behind = text[max(place - 1, 0) : place], text[place : place + 1]
    return _is_of_word(before) != _is_of_word(behind)


def _is_end(text: str, place: int) -> bool:
    return place == len(text) or (place == len(text) - 1 and text[place] == "\n")


_CATEGORIES: Final[Mapping[object, Accepts]] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_WORD: _is_of_word,
    ops.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    ops.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    ops.CATEGORY_NOT_WORD: lambda char: not _is_of_word(char),
}
_PLACES: Final[Mapping[object, Callable[[str, int], bool]]] = {
    ops.AT_BEGINNING: lambda text, place: place == 0,
    ops.AT_BEGINNING_STRING: lambda text, place: place == 0,
    ops.AT_END: _is_end,
    ops.AT_END_STRING: lambda text, place: place == len(text),
    ops.AT_BOUNDARY: _is_boundary,
    ops.AT_NON_BOUNDARY: lambda text, place: not _is_boundary(text, place),
}


class PatternError(ValueError):
    """A pattern is malformed, or has a part that is not supported; the text says which."""


class Compiler:
    """The instructions of a pattern: of what is tried in turn, the first is preferred, as `re` does.

    Attributes:
        program: The instructions.
        groups: The numbers of named groups.
        num_slots: The number of places that a match notes.
    """

    def __init__(self, pattern: str) -> None:
        """Compiles a pattern.

        Raises:
            PatternError: It is malformed, too large or not supported.
        """
        try:
            parsed = parser.parse(pattern, re.DOTALL)
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(str(error)) from error
        if parsed.state.flags & ~(re.DOTALL | re.UNICODE).value:
            raise PatternError("flags are not supported")
        self.groups: Mapping[str, int] = dict(parsed.state.groupdict)
        self.num_slots = 2 * parsed.state.groups
        self.program: list[Instruction] = []
        self._add_all(parsed)
        self._add(Match())
        self._look_ahead()

    def _add(self, instruction: Instruction) -> int:
        if len(self.program) == MAX_INSTRUCTIONS:
            raise PatternError("it is too long")
        self.program.append(instruction)
        return len(self.program) - 1

    def _add_all(self, items: Any) -> None:
        literal = ""
        for op, value in [*items, (None, None)]:
            if op is ops.LITERAL:
                literal += chr(value)
                continue
            if literal:
                self._add(Text(literal))
                literal = ""
            if op is not None:
                self._add_one(op, value)

    def _add_one(self, op: Any, value: Any) -> None:
        if (accepts := _accepting(op, value)) is not None:
            self._add(Greedy(accepts))
        elif op is ops.BRANCH:
            self._add_branches(value[1])
        elif op is ops.SUBPATTERN and not value[1] and not value[2]:
            self._add_group(value[0], value[3])
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            self._add_repeat(*value, is_greedy=op is ops.MAX_REPEAT)
        elif op is ops.AT:
            self._add(At(_PLACES[value]))
        elif op in (ops.ASSERT, ops.ASSERT_NOT) and value[0] == 1:
            look = self._add(Match())
            self._add_all(value[1])
            self._add(Match())
            self.program[look] = Look(len(self.program), is_negated=op is ops.ASSERT_NOT)
        else:
            raise PatternError(f"{str(op).lower()} is not supported")

    def _add_group(self, number: int | None, items: Any) -> None:
        if number is None:
            self._add_all(items)
            return
        self._add(Save(2 * number))
        self._add_all(items)
        self._add(Save(2 * number + 1))

    def _add_branches(self, branches: Sequence[Any]) -> None:
        jumps = []
        for items in branches[:-1]:
            split = self._add(Match())
            self._add_all(items)
            jumps.append(self._add(Match()))
            self._join(split, is_greedy=True)
        self._add_all(branches[-1])
        for jump in jumps:
            self.program[jump] = Jump(len(self.program))

    def _add_repeat(self, low: int, high: int, items: Any, *, is_greedy: bool) -> None:
        accepts = _accepting(*items[0]) if len(items) == 1 else None
        if accepts is not None:
            self._add((Greedy if is_greedy else Lazy)(accepts, low, high))
            return
        for _ in range(low):
            self._add_all(items)
        splits = []
        if high is ops.MAXREPEAT:
            splits, mark = [self._add(Match())], self.num_slots
            self.num_slots += 1
            self._add(Save(mark))
            self._add_all(items)
            self._add(Moved(mark))
            self._add(Jump(splits[0]))
        else:
            for _ in range(low, high):
                splits.append(self._add(Match()))
                self._add_all(items)
        for split in splits:
            self._join(split, is_greedy=is_greedy)

    def _join(self, split: int, *, is_greedy: bool) -> None:
        """Puts a choice between what follows it and what is added next in the place that was kept for it."""
        inside, behind = split + 1, len(self.program)
        self.program[split] = Split(inside, behind) if is_greedy else Split(behind, inside)

    def _look_ahead(self) -> None:
        """Tells runs what follows them: so fewer lengths are tried, and the matches are the same."""
        for index, (one, behind) in enumerate(zip(self.program, self.program[1:], strict=False)):
            if isinstance(one, Greedy) and isinstance(behind, Text) and not one.accepts(behind.wanted[0]):
                self.program[index] = replace(one, is_final=True)
            elif isinstance(one, Lazy):
                self.program[index] = replace(one, ending=self._ending_from(index + 1))

    def _ending_from(self, index: int) -> Ending | None:
        between: Accepts | None = None
        for one in self.program[index:]:
            if isinstance(one, Text):
                return None if between is not None and between(one.wanted[0]) else Ending(one.wanted, between)
            if isinstance(one, Greedy) and between is None and one.low == 0 and one.high is ops.MAXREPEAT:
                between = one.accepts
            elif not isinstance(one, Save):
                return None
        return None


def _accepting(op: Any, value: Any) -> Accepts | None:
    """The test of a character; None for what is not one character."""
    if op is ops.ANY:
        return anything
    if op is ops.LITERAL:
        return chr(value).__eq__
    if op is ops.NOT_LITERAL:
        return chr(value).__ne__
    if op is not ops.IN:
        return None
    is_negated = value[0][0] is ops.NEGATE
    tests = [_part(*one) for one in value[is_negated:]]
    return lru_cache(maxsize=256)(lambda char: any(test(char) for test in tests) != is_negated)


def _part(op: Any, value: Any) -> Accepts:
    if op is ops.CATEGORY:
        return _CATEGORIES[value]
    low, high = value if op is ops.RANGE else (value, value)
    return lambda char: low <= ord(char) <= high
