"""Beam searches as requests of the scheduler.

Each token forks a beam, and the parent ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from llmstack_engine_core.admission import BEAM_MARK, error_output
from llmstack_engine_core.beams.beam_search import Beam, BeamSearch, CompleteBeam
from llmstack_engine_core.stages import Stage
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
    TokenLogprobs,
)

MAX_ROW_TOKENS = 2
"""A row ends by itself after so many tokens. It is forked and aborted after its first one, or after the second where
another beam of its search is late because it was preempted or not admitted."""
_OF_ROWS: Final = (
    "min_tokens", "no_repeat_ngram_size", "bad_words_token_ids", "allowed_token_ids", "repetition_penalty",
)  # fmt: skip
"""Parameters that decide which tokens a beam may get, or change their log-probabilities."""


class BeamSearches(Stage):
    """The searches of one engine core. A search arrives as `n` requests; all but the first name it in `fork_of`.

    It begins with the last of them, and ends with one output for each, best beam first. In between every running beam
    is a row: a request of the scheduler that shares its blocks with its parent. So a step computes one token per beam,
    all beams of all searches together.

    Attributes:
        request_id_to_search: The requests that belong to a search.
        row_id_to_search: The scheduler's requests that compute beams.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.request_id_to_search: dict[str, _Search] = {}
        self.row_id_to_search: dict[str, _Search] = {}
        self._scheduler = scheduler

    @property
    def is_in_use(self) -> bool:
        """Whether there is a search."""
        return bool(self.request_id_to_search)

    def hold(self, request: EngineCoreRequest) -> bool:
        """Adds one beam of a search; the last one starts it. True: its rows go to the scheduler, and not the request.

        Raises:
            InvalidRequestError: The scheduler refuses it, or its search is gone.
        """
        search = self._find_search(request)
        search.request_ids.append(request.request_id)
        self.request_id_to_search[request.request_id] = search
        if len(search.request_ids) == search.beams.width:
            self._start(search)
        return True

    def abort(self, request_ids: list[str]) -> list[str]:
        """Ends a search once all of its requests are aborted; returns the ids that the scheduler has to abort."""
        aborted: list[str] = []
        for request_id in request_ids:
            search = self.request_id_to_search.pop(request_id, None)
            if search is None:
                aborted.append(request_id)
                continue
            search.unwanted_ids.add(request_id)
            if len(search.unwanted_ids) == len(search.request_ids):
                aborted += self._forget(search)
        return aborted

    def update(self, step_outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Advances the searches by a step: outputs of rows are replaced by those of searches that have ended."""
        outputs: list[EngineCoreOutput] = []
        touched: dict[_Search, None] = {}
        for row_output in step_outputs.outputs:
            search = self.row_id_to_search.get(row_output.request_id)
            if search is None:
                outputs.append(row_output)
            else:
                search.take(row_output)
                touched[search] = None
        for search in touched:
            outputs += self._advance(search)
        return step_outputs._replace(outputs=outputs)

    def _find_search(self, request: EngineCoreRequest) -> _Search:
        if not request.fork_of:
            return _Search(request)
        search = self.request_id_to_search.get(request.fork_of)
        if search is None or search.row_ids:
            raise InvalidRequestError("The beam search of this request is gone or has all its beams.", param="fork_of")
        return search

    def _start(self, search: _Search) -> None:
        try:
            self._add_rows(search, [])
        except InvalidRequestError:
            self._forget(search)
            raise

    def _advance(self, search: _Search) -> list[EngineCoreOutput]:
        """Takes the next token of every beam, once all have one; returns the outputs of a search that has ended."""
        if search.is_waiting:
            return []
        try:
            if search.advance():
                self._replace_rows(search)
                return []
        except InvalidRequestError as error:
            search.error = error.message
        self._scheduler.abort_requests(self._forget(search))
        return search.outputs()

    def _replace_rows(self, search: _Search) -> None:
        parent_ids, search.row_ids = search.row_ids, []
        try:
            self._add_rows(search, parent_ids)
        finally:
            for row_id in parent_ids:
                del self.row_id_to_search[row_id]
            self._scheduler.abort_requests(parent_ids)
            search.ended_row_ids.clear()

    def _add_rows(self, search: _Search, parent_ids: Sequence[str]) -> None:
        """Gives each running beam a row, forked from its parent's row unless that has ended."""
        for beam in search.beams.running:
            row = search.make_row(beam)
            parent_id = parent_ids[beam.parent] if parent_ids else ""
            if parent_id and parent_id not in search.ended_row_ids:
                self._scheduler.fork_request(parent_id, row)
            else:
                self._scheduler.add_request(row)
            search.row_ids.append(row.request_id)
            self.row_id_to_search[row.request_id] = search

    def _forget(self, search: _Search) -> list[str]:
        """Forgets a search; returns the ids of its rows, which are still to be aborted."""
        for request_id in search.request_ids:
            self.request_id_to_search.pop(request_id, None)
        for row_id in search.row_ids:
            del self.row_id_to_search[row_id]
        return search.row_ids


class _Search:
    """One search under way.

    Attributes:
        request_ids: The requests that get the complete beams, best first.
        unwanted_ids: Those of them that have been aborted.
        row_ids: The scheduler's requests that compute the running beams, in the beams' order.
        ended_row_ids: Rows that the scheduler no longer has.
        error: Why the search failed.
    """

    def __init__(self, leader: EngineCoreRequest) -> None:
        self.beams = BeamSearch(leader)
        self.request_ids: list[str] = []
        self.unwanted_ids: set[str] = set()
        self.row_ids: list[str] = []
        self.ended_row_ids: set[str] = set()
        self.error: str | None = None
        self._leader = leader
        self._row_id_to_choices: dict[str, TokenLogprobs] = {}
        self._num_rows = 0
        self._num_cached_tokens = -1

    @property
    def is_waiting(self) -> bool:
        """Whether some beam has no next token yet."""
        return self.error is None and len(self._row_id_to_choices) < len(self.row_ids)

    def make_row(self, beam: Beam) -> EngineCoreRequest:
        """The request that computes the next tokens of a beam, whose tokens so far count as its output."""
        self._num_rows += 1
        asked = self._leader.sampling_params
        params = SamplingParams(
            temperature=0.0,
            seed=0,
            ignore_eos=True,
            max_tokens=len(beam.token_ids) + min(MAX_ROW_TOKENS, self.beams.num_tokens_left),
            logprobs=self.beams.num_choices,
            use_beam_search=True,  # no drafts for it
            **{name: getattr(asked, name) for name in _OF_ROWS},
        )
        return replace(
            self._leader,
            request_id=f"{self._leader.request_id}{BEAM_MARK}{self._num_rows}",
            prompt_token_ids=list(self._leader.prompt_token_ids),
            output_token_ids=beam.token_ids,
            sampling_params=params,
            # None of these ends the row: they are what `min_tokens` masks.
            eos_token_ids=(*self._leader.eos_token_ids, *(asked.stop_token_ids or ())),
        )

    def take(self, output: EngineCoreOutput) -> None:
        """Applies the output of one row; its second token is ignored."""
        if output.finish_reason is not None:
            self.ended_row_ids.add(output.request_id)
        if output.finish_reason is FinishReason.ERROR:
            self.error = output.error or "A beam failed."
        if output.logprobs:
            self._row_id_to_choices.setdefault(output.request_id, output.logprobs[0])
        if self._num_cached_tokens < 0:
            self._num_cached_tokens = output.num_cached_tokens

    def advance(self) -> bool:
        """Advances all beams by one token; False if the search has ended."""
        if self.error is not None:
            return False
        self.beams.advance([self._row_id_to_choices[row_id] for row_id in self.row_ids])
        self._row_id_to_choices.clear()
        if self.beams.is_over and len(self.beams.complete) < self.beams.width:
            self.error = f"There are fewer answers that are allowed than beams ({self.beams.width})."
        return not self.beams.is_over

    def outputs(self) -> list[EngineCoreOutput]:
        """The final outputs of the requests that were not aborted."""
        beams = [None] * len(self.request_ids) if self.error is not None else self.beams.complete
        pairs = zip(self.request_ids, beams, strict=True)
        return [self._output(request_id, beam) for request_id, beam in pairs if request_id not in self.unwanted_ids]

    def _output(self, request_id: str, complete: CompleteBeam | None) -> EngineCoreOutput:
        if complete is None:
            return error_output(request_id, self.error or "")
        return EngineCoreOutput(
            request_id,
            list(complete.beam.token_ids),
            logprobs=list(complete.beam.logprobs) or None,
            finish_reason=complete.finish_reason,
            stop_reason=complete.stop_reason,
            num_cached_tokens=self._num_cached_tokens,
        )
