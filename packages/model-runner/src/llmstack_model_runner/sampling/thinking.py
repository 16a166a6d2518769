"""Budget of reasoning tokens: once spent, the end of the reasoning is forced."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmstack_types import SamplingParams

_MAX_TOKENS_BEFORE_START = 16
"""Reasoning begins an answer, after white space at most; a start tag further on is text."""


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """The budget of one request.

    The forced token follows from the generated tokens alone. So a preempted request, one that another engine core goes
    on with, and each draft of a row get the same one.

    Attributes:
        num_tokens: Tokens of reasoning, the tags left out.
        start: Tokens that begin it.
        end: Tokens that end it; at least one.
        is_open: Whether the prompt ends inside it.
    """

    num_tokens: int
    start: npt.NDArray[np.int32]
    end: npt.NDArray[np.int32]
    is_open: bool

    @staticmethod
    def of(params: SamplingParams) -> ThinkingLimit | None:
        """The limit of a request; None where it has none."""
        tags = params.thinking_tags
        if params.thinking_token_budget is None or tags is None:
            return None
        start, end = (np.array(ids, dtype=np.int32) for ids in (tags.start_token_ids, tags.end_token_ids))
        return ThinkingLimit(params.thinking_token_budget, start, end, tags.is_open)

    def forced_token(self, output: npt.NDArray[np.int32]) -> int | None:
        """The token that must follow the generated tokens `output`; None where the model chooses.

        Cost: at most as many comparisons as the budget has tokens, and none once the reasoning has to be over.
        """
        first = 0 if self.is_open else self._end_of_start(output)
        if first is None:
            return None
        num_spent = len(output) - first
        if not self.num_tokens <= num_spent < self.num_tokens + len(self.end):
            return None  # not spent yet, or ended by now
        num_forced = num_spent - self.num_tokens
        if _find(output[first : first + self.num_tokens], self.end) is not None:
            return None  # the model has ended it
        return int(self.end[num_forced])

    def _end_of_start(self, output: npt.NDArray[np.int32]) -> int | None:
        found = _find(output[: _MAX_TOKENS_BEFORE_START + len(self.start)], self.start)
        return None if found is None else found + len(self.start)


def _find(tokens: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]) -> int | None:
    """The first place of `wanted`."""
    if not len(wanted) or len(tokens) < len(wanted):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(wanted))
    places = np.flatnonzero((windows == wanted).all(axis=1))
    return int(places[0]) if len(places) else None
