"""Index of a text that finds where the last tokens of another one occurred."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

SHORTEST_MATCH: Final = 2
"""Tokens that an occurrence has in common at least: one alone says little of what follows."""

MAX_NUM_OCCURRENCES: Final = 16
"""Occurrences that a lookup visits, the latest ones: it takes the same time at any length of the text."""


class Occurrence(NamedTuple):
    """A place of the text where the looked-up tokens occurred.

    Attributes:
        end: The number of the token that follows them, counted from the first one that was ever added.
        length: How many of them.
    """

    end: int
    length: int


class SuffixIndex:
    """Chains of the places of each pair of tokens, latest first, as LZ77's (RFC 1951, section 4).

    A suffix tree finds the same longest matches, in one node for each token and level; here a token takes an entry in a
    chain, about 150 bytes at most. Text may be dropped at its beginning.

    Attributes:
        start: Tokens that were dropped.
    """

    __slots__ = ("_pair_to_end", "_previous", "_token_ids", "start")

    def __init__(self) -> None:
        self.start = 0
        self._token_ids: list[int] = []
        self._previous = array("q")  # of each token: where its pair ended before; 0 for nowhere
        self._pair_to_end: dict[int, int] = {}

    @property
    def end(self) -> int:
        """Tokens that were ever added."""
        return self.start + len(self._token_ids)

    def token_at(self, place: int) -> int:
        """The token of a place in [`start`, `end`)."""
        return self._token_ids[place - self.start]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds tokens, a negative one for the end of a text; O(their number)."""
        last = self._token_ids[-1] if self._token_ids else -1
        note, ends, end = self._previous.append, self._pair_to_end, self.end
        for token_id in token_ids:
            end += 1
            pair = _pair(last, token_id)
            note(ends.get(pair, 0))
            ends[pair] = end
            last = token_id
        self._token_ids += token_ids

    def drop(self, num_tokens: int) -> None:
        """Drops the first tokens, with an end of a text behind them; O(tokens of the text), by copies of memory."""
        last = -1
        for place, token_id in enumerate(self._token_ids[:num_tokens], self.start + 1):
            pair = _pair(last, token_id)
            if self._pair_to_end[pair] == place:
                del self._pair_to_end[pair]
            last = token_id
        del self._token_ids[:num_tokens]
        del self._previous[:num_tokens]
        self.start += num_tokens

    def find(self, token_ids: Sequence[int], longest: int) -> list[Occurrence]:
        """Places of the last tokens with something behind them, latest first; at most `longest` are compared."""
        found: list[Occurrence] = []
        if len(token_ids) < SHORTEST_MATCH:
            return found
        end = self._pair_to_end.get(_pair(token_ids[-2], token_ids[-1]), 0)
        while end > self.start and len(found) < MAX_NUM_OCCURRENCES:
            if end < self.end:
                found.append(Occurrence(end, self._match(token_ids, end - self.start, longest)))
            end = self._previous[end - 1 - self.start]
        return found

    def _match(self, token_ids: Sequence[int], end: int, longest: int) -> int:
        """The length of what both texts end with, of this one up to `end`; the pair is known to be equal."""
        length, own = SHORTEST_MATCH, self._token_ids
        limit = min(longest, end, len(token_ids))
        while length < limit and own[end - 1 - length] == token_ids[-1 - length]:
            length += 1
        return length


def _pair(first: int, second: int) -> int:
    """A number of a pair of tokens, of which no other pair of tokens from 0 on has the same."""
    return first << 32 | second
