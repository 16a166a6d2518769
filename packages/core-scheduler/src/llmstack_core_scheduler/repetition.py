"""Detection of an output that repeats itself."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_types import RepetitionDetectionParams


class RepetitionDetector:
    """Finds out whether the last output tokens are one pattern, repeated.

    For each length of a pattern it counts the tokens in a row that equal the token that far before them. A pattern of
    length L occurs k times in a row where that count has reached L (k - 1). A token costs one comparison per length.
    """

    __slots__ = ("_lengths", "_min_repeats", "_num_seen", "_runs", "_start")

    def __init__(self, params: RepetitionDetectionParams, num_prompt_tokens: int) -> None:
        self._lengths = range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
        self._runs = [0] * len(self._lengths)
        self._min_repeats = params.min_count - 1
        self._start = self._num_seen = num_prompt_tokens

    def is_repeating(self, token_ids: Sequence[int]) -> bool:
        """Whether the output ends with a repeated pattern; `token_ids` is the prompt with the output so far."""
        is_found = False
        for position in range(self._num_seen, len(token_ids)):
            is_found = self._add(token_ids, position)
        self._num_seen = len(token_ids)
        return is_found

    def _add(self, token_ids: Sequence[int], position: int) -> bool:
        runs, token_id, is_found = self._runs, token_ids[position], False
        for index, length in enumerate(self._lengths):
            before = position - length
            if before < self._start:  # so are those of all longer patterns
                break
            runs[index] = runs[index] + 1 if token_ids[before] == token_id else 0
            is_found = is_found or runs[index] >= length * self._min_repeats
        return is_found
