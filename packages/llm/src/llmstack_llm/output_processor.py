"""Conversion of the engine core's outputs to text and outputs of requests."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from llmstack_llm.outputs.collector import ObservedCollector, RequestOutputCollector
from llmstack_llm.outputs.observers import RequestObserver, SubmittedRequest, notify
from llmstack_llm.outputs.request_state import (
    CompletionState,
    PromptLogprobs,
    RequestState,
    StepTimes,
    count_tokens,
    split,
)
from llmstack_llm.outputs.stats import FinishedRequestStats, IterationStats, between
from llmstack_llm.pooling.states import PoolingCollector, PoolingStates
from llmstack_llm.request_errors import failure_of
from llmstack_llm.requests import AdmittedRequest
from llmstack_llm.text.detokenizer import Detokenizer, make_detokenizer
from llmstack_llm.text.stop_strings import StopStringMatcher, StopStringStream
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import (
    EncoderStats,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    InvalidRequestError,
    NumericalError,
    RequestEvent,
    RequestFailedError,
    RequestOutputKind,
    RequestProgress,
    StepPhases,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ProcessedOutputs:
    """The results of one step's outputs.

    Attributes:
        request_ids: Requests whose stream has something new, each once, in order.
        request_ids_to_abort: Engine requests that have ended here and still run in the engine core.
    """

    request_ids: list[str] = field(default_factory=list)
    request_ids_to_abort: list[str] = field(default_factory=list)
    iteration_stats: IterationStats = field(default_factory=IterationStats)


class OutputProcessor:
    """Owns the state of every request in flight; needs no engine and no event loop.

    Attributes:
        pooling: The requests that return vectors.
        observers: Called for requests that are added from now on.
        reads_late: Whether log-probabilities of prompts are made as they are read, not before.
    """

    reads_late = False

    def __init__(self, tokenizer: Tokenizer | None, observers: Sequence[RequestObserver] = ()) -> None:
        self._tokenizer = tokenizer
        self.observers = tuple(observers)
        self.pooling = PoolingStates()
        self.request_id_to_state: dict[str, RequestState] = {}
        self._waiting: dict[str, RequestState] = {}  # those that have no output yet
        self.request_id_to_completion: dict[str, CompletionState] = {}
        self._step_times = StepTimes()
        self._num_aborted = 0
        self._engine_to_num_parts: dict[int, int] = {}
        self._encoded_s = 0.0

    @property
    def num_unfinished_requests(self) -> int:
        """Requests in flight, however many completions each has."""
        return len(self.request_id_to_state) + len(self.pooling)

    @property
    def num_unfinished_completions(self) -> int:
        """Completions in flight, and requests that pool."""
        return len(self.request_id_to_completion) + len(self.pooling.request_id_to_state)

    def num_unfinished_of(self, tenant: str) -> int:
        """The number of unfinished requests of one tenant; linear in the requests in flight."""
        states = self.request_id_to_state.values()
        num_completions = sum(state.num_unfinished for state in states if state.tenant == tenant)
        return num_completions + sum(one.request.tenant == tenant for one in self.pooling.request_id_to_state.values())

    def adapter_use(self) -> tuple[list[str], list[str]]:
        """Names of the adapters of requests that have had a place in a step, and of the others; sorted."""
        running, waiting = set[str](), set[str]()
        for state in self.request_id_to_state.values():
            if state.lora_request is not None:
                names = waiting if state.metrics.first_token_time_s is None else running
                names.add(state.lora_request.lora_name)
        return sorted(running), sorted(waiting)

    def progress(self, max_num: int) -> list[RequestProgress]:
        """The first `max_num` completions in flight, in the order of their submission."""
        return [
            RequestProgress.of(
                0 if one.index else len(one.parent.prompt_token_ids), len(one.token_ids), one.parent.sampling_params
            )
            for one in islice(self.request_id_to_completion.values(), max_num)
        ]

    def num_waiting_prompt_tokens(self, tenant: str | None = None) -> int:
        """Prompt tokens of requests that have no output yet, of one tenant or of all; linear in these requests."""
        states = self._waiting.values()
        waiting = [len(state.prompt_token_ids) for state in states if tenant in (None, state.tenant)]
        pooling = [one.request for one in self.pooling.request_id_to_state.values()]
        waiting += [len(one.prompt_token_ids) for one in pooling if tenant in (None, one.tenant)]
        return sum(waiting)

    def new_collector(self, output_kind: RequestOutputKind, *, is_split: bool = False) -> RequestOutputCollector:
        """A collector for the requests of one consumer; `is_split` as of the collector."""
        if self.observers:
            return ObservedCollector(output_kind, self.observers, is_split=is_split)
        return RequestOutputCollector(output_kind, is_split=is_split)

    def add_request(
        self,
        request_id: str,
        admitted: AdmittedRequest,
        requests: Sequence[EngineCoreRequest],
        collector: RequestOutputCollector,
        prompt_index: int = 0,
    ) -> None:
        """Registers a request; call it before the engine core gets the request, so that no output can come too early.

        `prompt_index`: Its place among the requests of the collector.

        Raises:
            InvalidRequestError: The id, or that of a completion, is in use; the one in flight is unharmed.
        """
        self._check_ids(request_id, requests)
        params = admitted.sampling_params
        parent = RequestState(request_id, admitted, requests, collector, self._step_times, prompt_index)
        matcher = StopStringMatcher(params.stop_strings) if params.stop else None
        self.request_id_to_state[request_id] = self._waiting[request_id] = parent
        for index, request in enumerate(requests):
            self.request_id_to_completion[request.request_id] = self._completion(parent, index, request, matcher)
        if isinstance(collector, ObservedCollector):
            first = requests[0]
            submitted = SubmittedRequest(
                request_id, admitted.prompt, admitted.prompt_token_ids, params, len(requests),
                first.tenant, first.cache_salt, first.lora_name or "",
            )  # fmt: skip
            collector.open(submitted)

    def add_pooling_request(
        self, prompt: str | None, request: EngineCoreRequest, on_end: Callable[[], None] | None = None
    ) -> PoolingCollector:
        """Registers a request that returns a vector; raises as `add_request`. `on_end`: Called at its end."""
        self._check_ids(request.request_id, [request])
        return self.pooling.add(prompt, request, on_end)

    def note_engine(self, outputs: Sequence[EngineCoreOutput], engine: EngineReady) -> None:
        """Notes the engine core of the outputs that are processed next; another one may replace it."""
        for output in outputs:
            completion = self.request_id_to_completion.get(output.request_id)
            if completion is not None:
                completion.parent.note_engine(engine)

    def process_outputs(
        self,
        outputs: Sequence[EngineCoreOutput],
        timestamp_s: float,
        events: Iterable[RequestEvent] = (),
        phases: StepPhases | None = None,
    ) -> ProcessedOutputs:
        """Applies one step's outputs. An error with one request ends that request alone."""
        stats = IterationStats(timestamp_s=timestamp_s, phases=phases, num_aborted=self._num_aborted)
        self._num_aborted = 0
        if phases is not None:
            self._step_times.scheduler_s += phases.schedule_s + phases.update_s
            self._step_times.model_s += phases.execute_s
        for request_id, status, time_s in events:
            state = self.request_id_to_completion.get(request_id)
            if state is not None:
                state.note_status(status, time_s)
            else:
                self.pooling.note_status(request_id, status, time_s)
        if self.observers:
            notify(self.observers, RequestObserver.on_engine_outputs, outputs)
        processed = ProcessedOutputs(iteration_stats=stats)
        touched: dict[str, None] = {}
        for output in outputs:
            completion = self.request_id_to_completion.get(output.request_id)
            if completion is None:
                if self.pooling.process(output, timestamp_s, processed.iteration_stats):
                    touched[output.request_id] = None
                continue  # or aborted while this was on its way
            is_split = len(output.new_token_ids) > 1 and completion.parent.collector.is_split
            process = functools.partial(_process_tokens, self._process_output) if is_split else self._process_output
            try:
                is_new = process(completion, output, timestamp_s, processed)
            except Exception:  # whatever it is, the other requests of this step go on
                logger.exception("request %s failed in output processing", completion.parent.request_id)
                self._fail(
                    completion.parent, RequestFailedError("the request's output could not be processed"), processed
                )
                is_new = True
            if is_new:
                touched[completion.parent.request_id] = None
        processed.request_ids = list(touched)
        return processed

    def abort_requests(self, request_ids: Iterable[str], *, is_silent: bool = False) -> list[str]:
        """Ends requests; their streams end with finish reason `abort`, unless `is_silent`. Unknown ids are ignored.

        Returns:
            The engine requests to abort.
        """
        aborted: list[str] = []
        for request_id in request_ids:
            parent = self.request_id_to_state.get(request_id)
            if parent is None:
                if self.pooling.abort(request_id, is_silent=is_silent):
                    aborted.append(request_id)
                continue
            for completion in self._unfinished(parent):
                aborted.append(completion.request_id)
                self._num_aborted += 1
                completion.finish(FinishReason.ABORT.value, None)
                self._drop(completion)
                output = None if is_silent else completion.output()
                if output is not None:
                    parent.deliver(output)
        return aborted

    def note_encoder(self, iteration: IterationStats, stats: EncoderStats) -> None:
        """Notes the encoder's work after a step."""
        if stats.num_parts != self._engine_to_num_parts.get(iteration.engine_index, 0):
            self._engine_to_num_parts[iteration.engine_index] = stats.num_parts
            self._encoded_s = iteration.timestamp_s

    def find_stalled(self, since_s: float, *, counts_waiting: bool) -> list[str]:
        """Requests that nothing has happened to since then, in monotonic seconds.

        Those with pictures or sound get on while anything is encoded: theirs is, or its turn comes.

        `counts_waiting`: Whether requests that were in no step yet count too.
        """
        is_encoding = self._encoded_s >= since_s
        return self.pooling.find_stalled(since_s, counts_waiting=counts_waiting, is_encoding=is_encoding) + [
            request_id
            for request_id, state in self.request_id_to_state.items()
            if state.last_progress_s < since_s
            and (counts_waiting or state.metrics.scheduled_time_s is not None)
            and not (is_encoding and state.has_media)
        ]

    def fail_all(self, error: Exception) -> None:
        """Ends every stream with an error, as when the engine core is gone."""
        for parent in list(self.request_id_to_state.values()):
            self._fail(parent, error, ProcessedOutputs())
        self.pooling.fail_all(error)

    def _check_ids(self, request_id: str, requests: Sequence[EngineCoreRequest]) -> None:
        in_use = (self.request_id_to_state, self.request_id_to_completion, self.pooling.request_id_to_state)
        for one in (request_id, *(request.request_id for request in requests)):
            if any(one in states for states in in_use):
                message = f"Invalid 'request_id': '{request_id[:64]}' is in use."
                raise InvalidRequestError(message, param="request_id", code="invalid_value")

    def _completion(
        self, parent: RequestState, index: int, request: EngineCoreRequest, matcher: StopStringMatcher | None
    ) -> CompletionState:
        params = parent.sampling_params
        detokenizer: Detokenizer | None = None
        stop: StopStringStream | None = None
        if self._tokenizer is not None and params.detokenize:
            special = self._tokenizer.special_token_ids
            detokenizer = make_detokenizer(
                self._tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                kept_special_tokens=params.kept_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                is_continuation=not special.issuperset(request.prompt_token_ids),
            )
            if matcher is not None:
                stop = StopStringStream(matcher, include_stop_string=params.include_stop_str_in_output)
        return CompletionState(parent, index, request.request_id, self._tokenizer, detokenizer, stop)

    def _process_output(
        self, completion: CompletionState, output: EngineCoreOutput, timestamp_s: float, processed: ProcessedOutputs
    ) -> bool:
        """True if the request's stream has something new."""
        parent = completion.parent
        if output.finish_reason is FinishReason.ERROR:
            failure = failure_of(output.error)
            processed.iteration_stats.num_corrupted += isinstance(failure, NumericalError)
            self._fail(parent, failure, processed)
            return True
        if output.num_cached_tokens >= 0 or output.prompt_logprobs is not None:
            self._record_prompt(parent, output, processed.iteration_stats)
        if output.kv_transfer is not None:
            parent.take_transfer(output.kv_transfer, processed.iteration_stats)
        if output.new_token_ids:
            stats, num_tokens = processed.iteration_stats, len(output.new_token_ids)
            count_tokens(completion, num_tokens, timestamp_s, stats, self._waiting)
        if not completion.is_prompt_only and completion.append_all(output):
            completion.finish_with_stop_string()
            if output.finish_reason is None:
                processed.request_ids_to_abort.append(completion.request_id)
        elif output.finish_reason is not None:
            reason = FinishReason.LENGTH if completion.is_prompt_only else output.finish_reason
            completion.finish(reason.value, output.stop_reason)
        if completion.finish_reason is not None:
            self._drop(completion)
            _count_finished(completion, timestamp_s, processed.iteration_stats)
        elif parent.output_kind is RequestOutputKind.FINAL_ONLY:
            return False
        news = completion.output()
        return news is not None and parent.deliver(news)

    def _record_prompt(self, parent: RequestState, output: EngineCoreOutput, stats: IterationStats) -> None:
        if output.num_cached_tokens >= 0 and parent.num_cached_tokens is None:
            parent.num_cached_tokens = output.num_cached_tokens
            stats.num_cached_tokens += output.num_cached_tokens
            stats.num_disk_tokens += output.num_disk_tokens
        if output.prompt_logprobs is not None:
            made = PromptLogprobs(output.prompt_logprobs, self._tokenizer)
            parent.take_prompt_logprobs(made if self.reads_late else list(made))

    def _fail(self, parent: RequestState, error: Exception, processed: ProcessedOutputs) -> None:
        for completion in self._unfinished(parent):
            processed.request_ids_to_abort.append(completion.request_id)
            processed.iteration_stats.num_failed += 1
            self._drop(completion)
        parent.collector.put_error(error)

    def _unfinished(self, parent: RequestState) -> list[CompletionState]:
        found = (self.request_id_to_completion.get(request_id) for request_id in parent.completion_ids)
        return [completion for completion in found if completion is not None]

    def _drop(self, completion: CompletionState) -> None:
        if self.request_id_to_completion.pop(completion.request_id, None) is None:
            return
        completion.parent.num_unfinished -= 1
        if completion.parent.num_unfinished == 0:
            del self.request_id_to_state[completion.parent.request_id]
            self._waiting.pop(completion.parent.request_id, None)
            if completion.parent.on_end is not None:
                completion.parent.on_end()


def _process_tokens(
    process: Callable[[CompletionState, EngineCoreOutput, float, ProcessedOutputs], bool],
    completion: CompletionState, output: EngineCoreOutput, timestamp_s: float, processed: ProcessedOutputs,
) -> bool:  # fmt: skip
    """Processes an output token by token, until a stop string is complete."""
    parts = (part for part in split(output) if completion.finish_reason is None)
    news = [process(completion, part, timestamp_s, processed) for part in parts]
    return any(news)


def _count_finished(completion: CompletionState, timestamp_s: float, stats: IterationStats) -> None:
    parent, num_tokens, first_s = completion.parent, len(completion.token_ids), completion.first_token_time_s
    finished = FinishedRequestStats(
        finish_reason=completion.finish_reason or "",
        e2e_latency_s=timestamp_s - parent.metrics.arrival_time_s,
        num_prompt_tokens=len(parent.prompt_token_ids),
        num_generation_tokens=num_tokens,
        num_cached_tokens=parent.num_cached_tokens or 0,
        max_tokens=parent.sampling_params.max_tokens,
        time_to_first_token_s=None if first_s is None else first_s - parent.metrics.arrival_time_s,
        mean_time_per_output_token_s=None
        if first_s is None or num_tokens < 2
        else (timestamp_s - first_s) / (num_tokens - 1),
        queue_time_s=between(parent.metrics.arrival_time_s, completion.scheduled_time_s),
        prefill_time_s=between(completion.scheduled_time_s, first_s),
        decode_time_s=between(first_s, completion.last_token_time_s),
        inference_time_s=between(completion.scheduled_time_s, completion.last_token_time_s),
        num_preemptions=completion.num_preemptions,
    )
    stats.finished_requests.append(finished)
    parent.max_num_generation_tokens = max(parent.max_num_generation_tokens, num_tokens)
    if not parent.num_unfinished:
        stats.whole_requests.append((parent.sampling_params.n, parent.max_num_generation_tokens))
