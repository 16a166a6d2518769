"""Calls inside reasoning that is never closed."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_output_parsers.reader import MAX_HELD_CHARS, Reader


class UnclosedCalls:
    """Holds reasoning from the start of a call on, since it is a call if the reasoning is never closed.

    Reasoning with more text than may be held after such a start is reasoning to its end.
    """

    def __init__(self, starts: Sequence[str]) -> None:
        """`starts`: The texts that begin a call; all begin with the same character."""
        self._starts = starts
        self._reader = Reader()
        self._held: list[str] = []
        self._num_held = 0
        self._is_full = False

    @property
    def has_start(self) -> bool:
        """Whether a call may have begun."""
        return bool(self._held)

    def add(self, text: str) -> str:
        """Adds reasoning, and returns what of it can be passed on."""
        if self._is_full:
            return text
        passed = ""
        if self._held:
            self._hold(text)
        else:
            self._reader.push(text)
            passed, start = self._reader.take_until(self._starts)
            if start:
                self._hold(start + self._reader.take_rest())
        if self._num_held <= MAX_HELD_CHARS:
            return passed
        self._is_full = True
        return passed + self.take()

    def take(self) -> str:
        """The reasoning that is held."""
        text = "".join(self._held) + self._reader.take_rest()
        self._held, self._num_held = [], 0
        return text

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_held += len(text)
