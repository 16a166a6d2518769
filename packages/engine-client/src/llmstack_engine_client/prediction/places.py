"""When a place becomes free, by what is known of the lengths of answers."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import exp, log, log1p
from typing import Final

from llmstack_types import RequestProgress

# Of the requests that may stop at any token, some end soon and some late: their shares differ by this.
_GOLDEN_SHARE: Final = 0.618034
_KEPT: Final = 0.98
_FIRST_OUTPUT_TOKENS: Final = 256.0
_MIN_SHARE: Final = 1e-6
# So large a share of answers that may stop at any token is shorter than their mean.
_MEAN_SHARE: Final = 1.0 - exp(-1.0)
_UNKNOWN: Final = RequestProgress(0, 0, round(_FIRST_OUTPUT_TOKENS), can_stop=True)


class AnswerLengths:
    """The lengths of answers; the last fifty count most.

    Attributes:
        mean: Their mean, in tokens.
    """

    def __init__(self) -> None:
        self.mean = self._num_tokens = _FIRST_OUTPUT_TOKENS
        self._num_stops = 1.0

    def observe(self, num_output_tokens: int, *, is_stopped: bool = True) -> None:
        """Notes an answer that has ended, by itself or by its limit."""
        self.mean += (1.0 - _KEPT) * (num_output_tokens - self.mean)
        self._num_stops = self._num_stops * _KEPT + is_stopped
        self._num_tokens = self._num_tokens * _KEPT + num_output_tokens

    @property
    def stop_rate(self) -> float:
        """The probability that a token is the last one, of an answer that may stop by itself."""
        return min(self._num_stops / max(self._num_tokens, 1.0), 0.5)


class Places:
    """The places of one engine core, first come first served, counted in steps after its last report.

    A request that cannot stop by itself takes a place for its `max_tokens`. Others end by chance. They get lengths that
    have together the known distribution, so that the first of many ends early.

    Attributes:
        num_prompt_tokens: Tokens of prompts that are to be computed before a further request has a place.
    """

    def __init__(self, max_num_rows: int, tokens_per_step: float = 1.0, stop_rate: float = 0.0) -> None:
        """`tokens_per_step`: Tokens of one request in a step, more than 1 with drafts.

        `stop_rate`: As of `AnswerLengths`.
        """
        self.num_prompt_tokens = 0
        self._max_num_rows = max_num_rows
        self._tokens_per_step = tokens_per_step
        self._log_kept = log1p(-stop_rate) if stop_rate > 0 else 0.0
        self._share = 0.5
        self._ends: list[float] = []

    @property
    def num_steps(self) -> float:
        """Steps until a further request has a place; 0 where one is free."""
        return self._ends[0] if len(self._ends) >= self._max_num_rows else 0.0

    def add_all(self, requests: Sequence[RequestProgress], num_uncounted: int = 0) -> None:
        """Adds the requests in flight in the order of their arrival, and `num_uncounted` later ones like their mean."""
        begun = sorted((one for one in requests if one.num_output_tokens), key=_num_left)[: self._max_num_rows]
        num_open = sum(one.can_stop for one in begun)
        number = 0
        for one in begun:
            self._ends.append(self._steps(one, (number + 0.5) / max(num_open, 1)))
            number += one.can_stop
        heapify(self._ends)
        for one in requests:
            if not one.num_output_tokens:
                self.add(one)
        if num_uncounted:
            self._add_like(requests, num_uncounted)

    def _add_like(self, requests: Sequence[RequestProgress], number: int) -> None:
        """Adds a number of waiting requests like the mean of some; the time for it does not depend on the number."""
        begun = [one._replace(num_output_tokens=0) for one in requests] or [_UNKNOWN]
        mean_steps = sum(self._steps(one, _MEAN_SHARE) for one in begun) / len(begun)
        while len(self._ends) < self._max_num_rows and number:
            heappush(self._ends, mean_steps)
            number -= 1
        self._ends = [end + number * mean_steps / self._max_num_rows for end in self._ends]
        self.num_prompt_tokens += number * sum(one.num_prompt_tokens for one in begun) // len(begun)

    def add(self, request: RequestProgress) -> None:
        """A further request comes."""
        begin = heappop(self._ends) if len(self._ends) >= self._max_num_rows else 0.0
        self._share = (self._share + _GOLDEN_SHARE) % 1.0
        heappush(self._ends, begin + self._steps(request, self._share))
        self.num_prompt_tokens += request.num_prompt_tokens

    def _steps(self, request: RequestProgress, share: float) -> float:
        """Steps until it ends; of those that may stop at any token, so large a share ends before."""
        num_tokens: float = _num_left(request)
        if request.can_stop and self._log_kept:
            num_tokens = min(log(max(1.0 - share, _MIN_SHARE)) / self._log_kept, num_tokens)
        return max(num_tokens / self._tokens_per_step, 1.0)


def _num_left(request: RequestProgress) -> int:
    return request.max_num_output_tokens - request.num_output_tokens
