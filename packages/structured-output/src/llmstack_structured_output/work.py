"""Processor time that following one text may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

MAX_SAVED_S: Final = 0.1
"""Seconds that a text begins with, and the most that it saves. A schema of 800 properties takes 9 ms in 300 tokens."""

TOKEN_S: Final = 0.001
"""Seconds that each token adds."""

SLOW_S: Final = 0.001
"""Calls that take longer are watched: most take 5 µs, which is less than a look at the processor's clock costs."""

Result = TypeVar("Result")


class Work:
    """A text's share of the processor. All requests of a step wait for its mask, so a text with none left has to end.

    A small grammar may be a slow one: where a text can be read in many ways, each token takes longer than the one
    before. With `e ::= e e | e "+" e | [a-z]` the 350th takes 0.7 s. The library's limits count items of its parser,
    and such a grammar has no more of them than a large schema.

    Attributes:
        is_watched: Whether the next call is measured in processor time and counted.
        is_slow: Whether a measured call was slow.
    """

    __slots__ = ("_saved_s", "is_slow", "is_watched")

    def __init__(self) -> None:
        self._saved_s = MAX_SAVED_S
        self.is_watched = self.is_slow = False

    def earn(self, num_tokens: int) -> None:
        """Adds what new tokens may cost."""
        self._saved_s = min(MAX_SAVED_S, self._saved_s + TOKEN_S * num_tokens)

    @property
    def is_spent(self) -> bool:
        """Whether the text has used more than it may."""
        return self._saved_s < 0

    def call(
        self,
        function: Callable[..., Result],
        *arguments: object,
        clock: Callable[[], float] = time.thread_time,
    ) -> Result:
        """Calls a function for this text. `clock`: The processor time of what the function does."""
        if self.is_watched:
            start_s = clock()
            result = function(*arguments)
            seconds = clock() - start_s
            self._saved_s -= seconds
            self.is_slow = self.is_slow or seconds > SLOW_S
            return result
        start_s = time.perf_counter()  # of the wall, which other processes and stops lengthen: it only begins a watch
        result = function(*arguments)
        self.is_watched = time.perf_counter() - start_s > SLOW_S
        return result

    def end_watch(self) -> None:
        """Measures no longer, unless the text was slow."""
        self.is_watched = self.is_slow
