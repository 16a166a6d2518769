"""Application of a step's results to its requests, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from llmstack_core_scheduler.drafting import Drafting
from llmstack_core_scheduler.encoding import Encoding, dependents_of
from llmstack_core_scheduler.output_builder import NOTHING_ELSE, build_error, build_output, build_pooled
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.stop_check import append_until_stop
from llmstack_types import EngineCoreOutput, ModelRunnerOutput, RequestStatus, ScheduledRequest

# Nearly all messages hold tokens only; calling the class, a function of Python around this, takes half as long again.
_make = tuple.__new__


class StepResults:
    """Appends tokens, and ends requests by the scheduler's `retire`."""

    def __init__(
        self,
        manager: KVCacheManager,
        drafting: Drafting,
        encoding: Encoding | None,
        with_kv: Callable[[], Iterable[Request]],
        retire: Callable[[Request, RequestStatus], None],
        start_again: Callable[[Iterable[Request], list[Request]], None],
        cache_blocks: Callable[[Request], None],
    ) -> None:
        """Takes the scheduler's functions; `with_kv` gives the requests that have anything computed."""
        self._manager = manager
        self._drafting = drafting
        self._encoding = encoding
        self._with_kv = with_kv
        self._retire = retire
        self._start_again = start_again
        self._cache_blocks = cache_blocks

    def update_row(
        self, row: ScheduledRequest, request: Request, sampled_ids: list[int], output: ModelRunnerOutput, step: int
    ) -> EngineCoreOutput | None:
        """Applies one row's results; None without a message, as after a chunk of a prefill."""
        if output.errors and (error := output.errors.get(request.request_id)) is not None:
            return self._fail_row(row, request, error)
        if request.prompt_logprobs is not None:
            request.add_prompt_logprobs(row.num_computed_tokens, output.prompt_logprobs.get(request.request_id, ()))
        draft_token_ids = row.draft_token_ids
        num_known_tokens = row.num_computed_tokens + row.num_scheduled_tokens - len(draft_token_ids)
        if num_known_tokens != len(request.token_ids):
            return None
        if len(sampled_ids) != 1 and not 0 < len(sampled_ids) <= len(draft_token_ids) + 1:
            return self._end_without_token(request, len(sampled_ids), output)
        new_token_ids, stop = append_until_stop(request, sampled_ids)
        if draft_token_ids:
            num_accepted = min(len(sampled_ids) - 1, len(new_token_ids))
            self._drafting.settle(request, len(draft_token_ids), num_accepted, is_stale=step <= request.recompute_step)
            if request.status is RequestStatus.RUNNING:
                self._cache_blocks(request)  # only now is it known what they hold
        if stop is not None:
            self._retire(request, stop.status)
        elif not request.has_more_to_tell:
            return _make(EngineCoreOutput, (request.request_id, new_token_ids, *NOTHING_ELSE))
        return build_output(request, new_token_ids, stop, output)

    def _end_without_token(self, request: Request, num_tokens: int, output: ModelRunnerOutput) -> EngineCoreOutput:
        if num_tokens or request.arrival.pooling_params is None:
            return self._fail(request, f"The model runner sampled {num_tokens} tokens.")
        self._retire(request, RequestStatus.FINISHED_STOPPED)
        return build_pooled(request, output)

    def fail_media(
        self, rows: Sequence[ScheduledRequest], requests: list[Request], errors: Mapping[str, str]
    ) -> list[EngineCoreOutput]:
        """Ends requests whose rows failed at an item, and starts those again that may read what these were to write.

        Before any other row of the step is updated, since it may have read that in the same step. A request that was
        aborted meanwhile gets no message, but its fork may have what it wrote.
        """
        messages = []
        for row, request in zip(rows, list(requests), strict=True) if self._encoding is not None else ():
            error, start = errors.get(row.request_id), row.num_computed_tokens
            if error is not None and start < request.media_end and self._encoding:
                self._encoding.forget_broken(request, start, row.num_scheduled_tokens)
                if not request.is_finished:
                    messages.append(self._fail_row(row, request, error))
                self._start_again(dependents_of(request, start, self._with_kv()), requests)
        return messages

    def _fail_row(self, row: ScheduledRequest, request: Request, error: str) -> EngineCoreOutput:
        num_hits = min(max(request.num_cached_tokens, 0), row.num_computed_tokens)  # the rest it wrote itself
        self._manager.forget_prefix(request.keys, num_hits, request.prefix_salt)
        return self._fail(request, error)

    def _fail(self, request: Request, error: str) -> EngineCoreOutput:
        self._retire(request, RequestStatus.FINISHED_ERROR)
        return build_error(request, error)
