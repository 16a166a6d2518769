"""The state of one beam search.

It decides which beams continue and which are complete. It does no I/O and runs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple

from llmstack_types import EngineCoreRequest, FinishReason, TokenLogprobs
from llmstack_types.engine_core import MIN_LOGPROB


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation of the prompt.

    Attributes:
        logprob: The sum over its tokens.
        logprobs: One entry per token where the request asked for log-probabilities, else none.
        parent: Which of the beams that ran before it goes on from.
    """

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    parent: int = 0


@dataclass(frozen=True, slots=True)
class CompleteBeam:
    """A beam that ended, with the score that ranks it: its log-probability over its length to the length penalty.

    Attributes:
        stop_reason: The stop token id that ended it; None for the end of sequence and for the length.
    """

    beam: Beam
    score: float
    finish_reason: FinishReason
    stop_reason: int | None = None


class _Candidate(NamedTuple):
    """A running beam with one more token; the order of candidates is that of their fields, best first."""

    negative_logprob: float
    parent: int
    rank: int  # among the parent's choices, 1 is the most likely
    token_id: int


class BeamSearch:
    """One search, as transformers defines it; `advance` it with the likeliest tokens after each running beam.

    Attributes:
        width: Running beams, and complete ones to find.
        num_choices: Number of likeliest tokens of each beam that `advance` needs, so that `width` beams can go on.
        running: The beams to be continued, best first: the empty one in the beginning.
        complete: The best that have ended, best first; at most `width`.
        is_over: Whether `complete` is the result.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        self._eos_token_ids = frozenset(() if params.ignore_eos else request.eos_token_ids)
        self._ending_token_ids = self._eos_token_ids.union(params.stop_token_ids or ())
        self._max_tokens = params.max_tokens or 1
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._num_logprobs = params.logprobs
        self._forced_end = params.forced_eos_token_id
        self._num_forced = int(params.forced_bos_token_id is not None)  # of the prompt here, and of beams there
        self.width = params.n
        self.num_choices = self.width + len(self._ending_token_ids)
        self.running = [Beam()]
        self.complete: list[CompleteBeam] = []
        self.is_over = False

    @property
    def num_tokens_left(self) -> int:
        """Tokens that a running beam may still get."""
        return self._max_tokens - len(self.running[0].token_ids)

    def advance(self, choices: Sequence[TokenLogprobs]) -> None:
        """Gives every running beam its next token. `choices` is parallel to `running`; its first tokens do not count.

        Only the best `width` candidates can become complete; what ranks below is there to take their places as
        running beams. Where masks leave fewer, fewer beams run.
        """
        if self._forced_end is not None and self.num_tokens_left == 1:
            choices = [TokenLogprobs((self._forced_end,) * 2, (0.0, 0.0), 1)] * len(choices)
        candidates = self._candidates(choices)
        ended = [candidate for candidate in nsmallest(self.width, candidates) if self._ends(candidate)]
        going_on = nsmallest(self.width, (candidate for candidate in candidates if not self._ends(candidate)))
        complete = [*self.complete, *(self._complete(self._grow(candidate, choices)) for candidate in ended)]
        self.complete = sorted(complete, key=lambda one: -one.score)[: self.width]  # of equals the earlier stays
        self.running = [self._grow(candidate, choices) for candidate in going_on]
        self.is_over = not self.running or self._is_settled()

    def _candidates(self, choices: Sequence[TokenLogprobs]) -> list[_Candidate]:
        return [
            _Candidate(-beam.logprob - logprob, parent, rank, choice.token_ids[rank])
            for parent, (beam, choice) in enumerate(zip(self.running, choices, strict=True))
            for rank, logprob in enumerate(choice.logprobs[1:], start=1)
            if logprob > MIN_LOGPROB
        ]

    def _ends(self, candidate: _Candidate) -> bool:
        return self.num_tokens_left == 1 or candidate.token_id in self._ending_token_ids

    def _grow(self, candidate: _Candidate, choices: Sequence[TokenLogprobs]) -> Beam:
        parent, choice = self.running[candidate.parent], choices[candidate.parent]
        logprobs = parent.logprobs
        if self._num_logprobs is not None:
            logprobs = (*logprobs, _chosen(choice, candidate.rank, self._num_logprobs))
        return Beam((*parent.token_ids, candidate.token_id), -candidate.negative_logprob, logprobs, candidate.parent)

    def _complete(self, beam: Beam) -> CompleteBeam:
        token_id, score = beam.token_ids[-1], self._score(beam, len(beam.token_ids))
        is_cut = self._forced_end is not None and len(beam.token_ids) == self._max_tokens
        if is_cut or token_id not in self._ending_token_ids:
            return CompleteBeam(beam, score, FinishReason.LENGTH)
        return CompleteBeam(beam, score, FinishReason.STOP, None if token_id in self._eos_token_ids else token_id)

    def _is_settled(self) -> bool:
        """Whether `width` beams are complete and, unless that is enough, the best running one cannot replace any."""
        if len(self.complete) < self.width:
            return False
        if self._early_stopping is True:
            return True
        best = self.running[0]
        is_longer_better = self._early_stopping == "never" and self._length_penalty > 0.0
        length = self._max_tokens if is_longer_better else len(best.token_ids)
        return self._score(best, length) <= self.complete[-1].score

    def _score(self, beam: Beam, length: int) -> float:
        return float(beam.logprob / (length + self._num_forced) ** self._length_penalty)


def _chosen(choice: TokenLogprobs, rank: int, num_logprobs: int) -> TokenLogprobs:
    """The entry of the token at `rank`, with the `num_logprobs` likeliest beside it."""
    return TokenLogprobs(
        (choice.token_ids[rank], *choice.token_ids[1 : 1 + num_logprobs]),
        (choice.logprobs[rank], *choice.logprobs[1 : 1 + num_logprobs]),
        rank,
    )
