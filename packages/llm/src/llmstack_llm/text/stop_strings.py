"""Search for stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStringMatcher:
    """Compiled stop strings (Aho and Corasick's automaton); shared by the completions of a request.

    A state is the longest end of the text so far that begins some stop string; its depth is what has to be held back.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.fallbacks = [0]
        self.matches: list[str | None] = [None]
        for stop_string in stop_strings:
            self._insert(stop_string)
        self._link()

    def advance(self, state: int, char: str) -> int:
        """The state after one more character; constant time, amortised."""
        while state and char not in self.children[state]:
            state = self.fallbacks[state]
        return self.children[state].get(char, 0)

    def _insert(self, stop_string: str) -> None:
        state = 0
        for char in stop_string:
            if char not in self.children[state]:
                self.children[state][char] = len(self.children)
                self.children.append({})
                self.depths.append(self.depths[state] + 1)
                self.fallbacks.append(0)
                self.matches.append(None)
            state = self.children[state][char]
        self.matches[state] = stop_string

    def _link(self) -> None:
        """Breadth first, so that a state's fallback, which is shallower, is complete before it."""
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.children[state].items():
                self.fallbacks[child] = self.advance(self.fallbacks[state], char)
                if self.matches[child] is None:
                    self.matches[child] = self.matches[self.fallbacks[child]]
                queue.append(child)


class StopStringStream:
    """The text of one completion on its way to the user.

    The stop string that is complete first ends it, of several that end there the longest; so the answer does not depend
    on where the text was cut into pieces. Each character is visited once.
    """

    def __init__(self, matcher: StopStringMatcher, *, include_stop_string: bool = False) -> None:
        self._matcher = matcher
        self._include_stop_string = include_stop_string
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def append(self, text: str) -> str:
        """The text that may be shown now; `matched` is set once a stop string was found, and no text follows it."""
        matcher, state = self._matcher, self._state
        for index, char in enumerate(text):
            state = matcher.advance(state, char)
            self.matched = matcher.matches[state]
            if self.matched is not None:
                return self._end(text[: index + 1])
        self._state = state
        if self._include_stop_string:
            return text
        text = self._held + text
        num_shown = len(text) - matcher.depths[state]
        self._held = text[num_shown:]
        return text[:num_shown]

    def append_unsearched(self, text: str) -> str:
        """Text in which no stop string counts, as before `min_tokens`; shown at once."""
        return self.finish() + text

    def finish(self) -> str:
        """The text that was held back for a stop string that did not come."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _end(self, text: str) -> str:
        held, self._held = self._held, ""
        if self._include_stop_string:
            return text
        return (held + text).removesuffix(self.matched or "")
