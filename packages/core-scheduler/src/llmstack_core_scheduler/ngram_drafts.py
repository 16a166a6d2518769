"""Drafts by prompt lookup.

The drafts are the tokens that followed when the last tokens of a request last occurred in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from llmstack_core_scheduler.protocols import DraftOwner
from llmstack_core_scheduler.speculative_config import SpeculativeConfig

MAX_NUM_INDEXED_TOKENS = 1 << 20
"""Tokens indexed at once, over all requests; one that finds no room gets no drafts until others have ended.

With n-grams of 2, 3 and 4 tokens, none of them twice, a token's entries take 450 bytes.
"""


class NgramDrafts:
    """A source of drafts that looks n-grams up in the request's own tokens (Saxena, "Prompt Lookup Decoding", 2023).

    Of the n-grams that the tokens end with, the longest that occurred before counts, at its latest place. Each request
    has an index that grows with its tokens, so that a token is looked at a fixed number of times.

    Attributes:
        num_indexed_tokens: Tokens of all requests that it has an index of.
    """

    def __init__(self, config: SpeculativeConfig, max_num_indexed_tokens: int = MAX_NUM_INDEXED_TOKENS) -> None:
        self._lengths = range(config.prompt_lookup_min, config.prompt_lookup_max + 1)
        self._max_num_indexed_tokens = max_num_indexed_tokens
        self.num_indexed_tokens = 0
        self._indices: dict[str, _NgramIndex] = {}

    def propose(
        self, request_id: str, token_ids: Sequence[int], max_num_tokens: int, owner: DraftOwner
    ) -> Sequence[int]:
        """The requested number of guesses, or none where no n-gram is found."""
        index = self._indices.get(request_id)
        num_new_tokens = len(token_ids) - (0 if index is None else index.num_tokens)
        if not 0 < num_new_tokens <= self._max_num_indexed_tokens - self.num_indexed_tokens:
            return []
        if index is None:
            index = self._indices[request_id] = _NgramIndex(self._lengths)
        self.num_indexed_tokens += num_new_tokens
        end = index.advance(token_ids)
        return [] if end is None else _continue(token_ids, end, max_num_tokens)

    def learn(self, owner: DraftOwner, token_ids: Sequence[int]) -> None:
        """Does nothing: each request is looked up alone."""

    def forget(self, request_id: str) -> None:
        """Drops the request's index."""
        index = self._indices.pop(request_id, None)
        if index is not None:
            self.num_indexed_tokens -= index.num_tokens


class _NgramIndex:
    """N-grams of one request's tokens, and where each of them ended last."""

    __slots__ = ("_length_to_ends", "num_tokens")

    def __init__(self, lengths: range) -> None:
        self.num_tokens = 0
        self._length_to_ends: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in lengths}

    def advance(self, token_ids: Sequence[int]) -> int | None:
        """Adds new tokens; the end of the longest known n-gram that `token_ids` end with, or None."""
        if len(token_ids) - self.num_tokens > 1:
            self._add_many(token_ids, len(token_ids) - 1)
        self.num_tokens = len(token_ids)
        found = None
        for length, ends in self._length_to_ends.items():  # the longest comes last
            ngram = tuple(token_ids[-length:])
            found = ends.get(ngram, found)
            ends[ngram] = self.num_tokens  # only now: it would have found itself
        return found

    def _add_many(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Notes the n-grams that end with the tokens up to `num_tokens`; in C, for the sake of long prompts."""
        for length, ends in self._length_to_ends.items():
            first = max(self.num_tokens - length + 1, 0)
            ngrams = zip(*(token_ids[first + offset : num_tokens] for offset in range(length)), strict=False)
            ends.update(zip(ngrams, count(first + length), strict=False))


def _continue(token_ids: Sequence[int], start: int, num_tokens: int) -> list[int]:
    """`num_tokens` drafts: the tokens from `start` on, repeated from there after the last known token."""
    following = token_ids[start : start + num_tokens]
    return [following[index % len(following)] for index in range(num_tokens)]
