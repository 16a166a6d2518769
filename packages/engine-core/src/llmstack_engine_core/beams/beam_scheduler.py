"""A scheduler that runs beam searches as rows of another one: with each token a beam is forked, and its parent goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from llmstack_engine_core.beams.beam_search import Beam, BeamSearch, CompleteBeam
from llmstack_engine_core.engine_core import error_output
from llmstack_engine_core.protocols import Scheduler
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)

MAX_ROW_TOKENS = 2
"""A row ends by itself after so many tokens. It is forked and aborted after its first one, and waits with the second
where another beam of its search is late, because it was preempted or found no place."""


class BeamScheduler:
    """Satisfies `Scheduler`. A search comes as `n` requests, its beams; all but the first name that one in `fork_of`.

    It begins with the last of them, and ends with one output for each, best first. In between every running beam is a
    request of the scheduler within, which shares its blocks with its parent: a step computes one token per beam, all
    beams of all searches together.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._request_id_to_search: dict[str, _Search] = {}
        self._row_id_to_search: dict[str, _Search] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request, or one more beam of a search.

        Raises:
            InvalidRequestError: The scheduler refuses it, or its search is gone.
        """
        if not request.sampling_params.use_beam_search:
            self._scheduler.add_request(request)
            return
        search = self._find_search(request)
        search.request_ids.append(request.request_id)
        self._request_id_to_search[request.request_id] = search
        if len(search.request_ids) == search.beams.width:
            self._start(search)

    def fork_request(self, parent_id: str, child: EngineCoreRequest) -> int:
        """Passes it on."""
        return self._scheduler.fork_request(parent_id, child)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once; a search, when nobody is left to receive its results."""
        aborted: list[str] = []
        for request_id in request_ids:
            search = self._request_id_to_search.pop(request_id, None)
            if search is None:
                aborted.append(request_id)
                continue
            search.unwanted_ids.add(request_id)
            if len(search.unwanted_ids) == len(search.request_ids):
                aborted += self._forget(search)
        self._scheduler.abort_requests(aborted)

    def has_unfinished_requests(self) -> bool:
        """True while a step could bring something; a search that has not begun brings nothing."""
        return self._scheduler.has_unfinished_requests()

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Chooses the rows of the next step."""
        return self._scheduler.schedule(now_s)

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, now_s: float
    ) -> EngineCoreOutputs:
        """Takes over the step's results; rows of searches bring nothing until a search is over."""
        step_outputs = self._scheduler.update_from_output(scheduled, output, now_s)
        if not self._row_id_to_search:
            return step_outputs
        outputs: list[EngineCoreOutput] = []
        touched: dict[_Search, None] = {}
        for row_output in step_outputs.outputs:
            search = self._row_id_to_search.get(row_output.request_id)
            if search is None:
                outputs.append(row_output)
            else:
                search.take(row_output)
                touched[search] = None
        for search in touched:
            outputs += self._go_on(search)
        return replace(step_outputs, outputs=outputs)

    def stats(self) -> SchedulerStats:
        """The state after the last step; each running beam counts as a request."""
        return self._scheduler.stats()

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        return self._scheduler.reset_prefix_cache()

    def _find_search(self, request: EngineCoreRequest) -> _Search:
        if not request.fork_of:
            return _Search(request)
        search = self._request_id_to_search.get(request.fork_of)
        if search is None or search.row_ids:
            raise InvalidRequestError("The beam search of this request is gone or has all its beams.", param="fork_of")
        return search

    def _start(self, search: _Search) -> None:
        try:
            self._add_rows(search, [])
        except InvalidRequestError:
            self._forget(search)
            raise

    def _go_on(self, search: _Search) -> list[EngineCoreOutput]:
        """Takes the next token of every beam, once all are there; what there is to tell where that ends the search."""
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
                del self._row_id_to_search[row_id]
            self._scheduler.abort_requests(parent_ids)
            search.ended_row_ids.clear()

    def _add_rows(self, search: _Search, parent_ids: Sequence[str]) -> None:
        """Gives each running beam a row, which goes on from its parent's where that is still there."""
        for beam in search.beams.running:
            row = search.make_row(beam)
            parent_id = parent_ids[beam.parent] if parent_ids else ""
            if parent_id and parent_id not in search.ended_row_ids:
                self._scheduler.fork_request(parent_id, row)
            else:
                self._scheduler.add_request(row)
            search.row_ids.append(row.request_id)
            self._row_id_to_search[row.request_id] = search

    def _forget(self, search: _Search) -> list[str]:
        """Forgets a search; the ids of its rows, which are still to be aborted."""
        for request_id in search.request_ids:
            self._request_id_to_search.pop(request_id, None)
        for row_id in search.row_ids:
            del self._row_id_to_search[row_id]
        return search.row_ids


class _Search:
    """One search under way.

    Attributes:
        request_ids: Who gets the complete beams, best first.
        unwanted_ids: Those of them that have been aborted.
        row_ids: The requests within that compute the running beams, in the beams' order.
        ended_row_ids: Rows that the scheduler within no longer knows.
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
        """Whether the next token of some beam is still to come."""
        return self.error is None and len(self._row_id_to_choices) < len(self.row_ids)

    def make_row(self, beam: Beam) -> EngineCoreRequest:
        """The request that computes what may follow a beam."""
        self._num_rows += 1
        params = SamplingParams(
            temperature=0.0,
            seed=0,
            ignore_eos=True,
            max_tokens=min(MAX_ROW_TOKENS, self.beams.num_tokens_left),
            logprobs=self.beams.num_choices,
            use_beam_search=True,  # so that nobody guesses its tokens
        )
        return replace(
            self._leader,
            request_id=f"{self._leader.request_id}/beam-{self._num_rows}",
            prompt_token_ids=[*self._leader.prompt_token_ids, *beam.token_ids],
            sampling_params=params,
        )

    def take(self, output: EngineCoreOutput) -> None:
        """Takes over what a step brought one row; a row's second token comes for nothing."""
        if output.finish_reason is not None:
            self.ended_row_ids.add(output.request_id)
        if output.finish_reason is FinishReason.ERROR:
            self.error = output.error or "A beam failed."
        if output.logprobs:
            self._row_id_to_choices.setdefault(output.request_id, output.logprobs[0])
        if self._num_cached_tokens < 0:
            self._num_cached_tokens = output.num_cached_tokens

    def advance(self) -> bool:
        """Takes the step that all beams are ready for; False if the search has ended."""
        if self.error is not None:
            return False
        self.beams.advance([self._row_id_to_choices[row_id] for row_id in self.row_ids])
        self._row_id_to_choices.clear()
        if self.beams.is_over and len(self.beams.complete) < self.beams.width:
            self.error = f"The vocabulary is too small for {self.beams.width} beams."
        return not self.beams.is_over

    def outputs(self) -> list[EngineCoreOutput]:
        """What everybody who still listens is told at the end."""
        beams = [None] * len(self.request_ids) if self.error is not None else self.beams.complete
        told = zip(self.request_ids, beams, strict=True)
        return [self._output(request_id, beam) for request_id, beam in told if request_id not in self.unwanted_ids]

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
