"""State of requests in flight and of their completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from llmstack_llm.adapters import LoRARequest, lora_request_of
from llmstack_llm.outputs.collector import RequestOutputCollector
from llmstack_llm.outputs.request_output import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from llmstack_llm.outputs.stats import IterationStats
from llmstack_llm.requests import AdmittedRequest
from llmstack_llm.text.detokenizer import Detokenizer
from llmstack_llm.text.stop_strings import StopStringStream
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    KVTransferParams,
    RequestOutputKind,
    RequestStatus,
    TokenLogprobs,
)

LOWEST_LOGPROB = -9999.0
"""JSON has no negative infinity; vLLM cuts here too."""


def logprobs_dict(entry: TokenLogprobs, tokenizer: Tokenizer | None, *, are_best: bool = True) -> dict[int, Logprob]:
    """The chosen token first, then the most likely ones with ranks 1, 2, 3 and so on.

    `are_best`: False where the others are tokens that the request named, whose ranks are unknown.
    """
    chosen_id = entry.token_ids[0]
    found: dict[int, Logprob] = {chosen_id: _logprob(chosen_id, entry.logprobs[0], entry.rank, tokenizer)}
    for rank, (token_id, logprob) in enumerate(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True), start=1):
        if token_id != chosen_id:
            found[token_id] = _logprob(token_id, logprob, rank if are_best else None, tokenizer)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """The log-probabilities of a prompt, each made as it is read: making millions at once would hold an event loop.

    Attributes:
        entries: One for each token of the prompt; None for the first.
        tokenizer: Of the texts; None where there are none.
    """

    entries: Sequence[TokenLogprobs | None]
    tokenizer: Tokenizer | None

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, place: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, place: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        if isinstance(place, slice):
            return [entry and logprobs_dict(entry, self.tokenizer) for entry in self.entries[place]]
        entry = self.entries[place]
        return entry and logprobs_dict(entry, self.tokenizer)


def _logprob(token_id: int, logprob: float, rank: int | None, tokenizer: Tokenizer | None) -> Logprob:
    logprob = max(logprob, LOWEST_LOGPROB)
    if tokenizer is None:
        return Logprob(logprob, rank)
    text = tokenizer.text_of(token_id)
    return Logprob(logprob, rank, text, tokenizer.bytes_of(token_id) if "\ufffd" in text else None)


def split(output: EngineCoreOutput) -> Iterator[EngineCoreOutput]:
    """An output for each token: what is about the prompt comes with the first one, the end with the last one."""
    last = len(output.new_token_ids) - 1
    for position, token_id in enumerate(output.new_token_ids):
        part = output if position == last else output._replace(finish_reason=None, stop_reason=None)
        if position:
            part = part._replace(prompt_logprobs=None, num_cached_tokens=-1)
        if position != (last if output.finish_reason is not None else 0):
            part = part._replace(kv_transfer=None)
        logprobs = None if output.logprobs is None else [output.logprobs[position]]
        yield part._replace(new_token_ids=[token_id], logprobs=logprobs)


@dataclasses.dataclass(slots=True)
class StepTimes:
    """The time of all steps so far, in seconds.

    Attributes:
        scheduler_s: Choosing batches and applying their results.
        model_s: Computing them.
    """

    scheduler_s: float = 0.0
    model_s: float = 0.0


class RequestState:
    """One request as the user sees it: its prompt, its stream, and how many of its completions go on.

    Attributes:
        has_media: Whether its prompt has pictures, sound or vectors.
        on_first_token: Called with the seconds from the submission to the first token; None for no call.
        on_end: Called when its last completion has ended; None for no call.
        completion_ids: Engine request ids of its completions, by index.
        max_num_generation_tokens: Tokens of the longest of its completions that have ended.
        engines: The engine cores that its outputs came from, in order; empty where none can be exchanged.
        step_times: The times of all steps so far.
        begin_s: What these were when the first of its completions got a place in a step.
    """

    def __init__(
        self,
        request_id: str,
        admitted: AdmittedRequest,
        requests: Sequence[EngineCoreRequest],
        collector: RequestOutputCollector,
        step_times: StepTimes | None = None,
        prompt_index: int = 0,
    ) -> None:
        """`prompt_index`: The request's place among those of the collector."""
        self.request_id = request_id
        self.prompt = admitted.prompt
        self.prompt_token_ids = requests[0].prompt_token_ids
        self.tenant = requests[0].tenant
        self.has_media = bool(requests[0].media)
        self.lora_request: LoRARequest | None = None
        if requests[0].lora_name is not None:
            self.lora_request = lora_request_of(requests[0].lora_name, requests[0].lora_path)
        self.sampling_params = admitted.sampling_params
        self.output_kind = self.sampling_params.output_kind
        self.collector = collector
        self.completion_ids = [request.request_id for request in requests]
        self.metrics = RequestMetrics(requests[0].arrival_time_s)
        self.num_unfinished = len(requests)
        self.on_first_token: Callable[[float], None] | None = None
        self.on_end = admitted.release
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
        self.has_new_prompt_logprobs = False
        self.kv_transfer: KVTransferParams | None = None
        self.max_num_generation_tokens = 0
        self.engines: tuple[EngineReady, ...] = ()
        self.step_times = step_times or StepTimes()
        self.begin_s = StepTimes()
        self._prompt_index = prompt_index
        self.finished_completions: dict[int, CompletionOutput] = {}

    def deliver(self, completion: CompletionOutput) -> bool:
        """Puts an output of one completion into the stream; False where `FINAL_ONLY` waits for the others."""
        completions, num_dropped_tokens = [completion], 0
        if self.output_kind is RequestOutputKind.FINAL_ONLY:
            if not completion.finished():
                return False
            self.finished_completions[completion.index] = completion
            if self.num_unfinished:
                return False
            every = [self.finished_completions[index] for index in sorted(self.finished_completions)]
            completions = _best(every, self.sampling_params.n)
            num_dropped_tokens = _num_tokens(every) - _num_tokens(completions)
        is_delta = self.output_kind is RequestOutputKind.DELTA
        if self.num_unfinished == 0:
            self.metrics.scheduler_time_s = self.step_times.scheduler_s - self.begin_s.scheduler_s
            self.metrics.model_time_s = self.step_times.model_s - self.begin_s.model_s
        prompt_logprobs = self.prompt_logprobs if not is_delta or self.has_new_prompt_logprobs else None
        self.has_new_prompt_logprobs = False
        self.collector.put(
            RequestOutput(
                request_id=self.request_id,
                prompt=self.prompt,
                prompt_token_ids=self.prompt_token_ids,
                prompt_logprobs=prompt_logprobs,
                outputs=completions,
                finished=self.num_unfinished == 0,
                metrics=self.metrics,
                num_cached_tokens=self.num_cached_tokens,
                num_dropped_tokens=num_dropped_tokens,
                prompt_index=self._prompt_index,
                lora_request=self.lora_request,
                kv_transfer_params=None if self.kv_transfer is None else self.kv_transfer._asdict(),
                engines=self.engines,
            )
        )
        return True

    @property
    def last_progress_s(self) -> float:
        """When something last happened to it."""
        metrics = self.metrics
        return max(metrics.arrival_time_s, metrics.scheduled_time_s or 0.0, metrics.last_token_time_s or 0.0)

    def take_prompt_logprobs(self, logprobs: Sequence[dict[int, Logprob] | None]) -> None:
        """The prompt is computed; its log-probabilities go out with the next output."""
        self.prompt_logprobs, self.has_new_prompt_logprobs = logprobs, True

    def note_engine(self, engine: EngineReady) -> None:
        """An output has come from this engine core."""
        if not self.engines or self.engines[-1] is not engine:
            self.engines += (engine,)

    def take_transfer(self, params: KVTransferParams, stats: IterationStats) -> None:
        """Blocks were exported for the request, or imported, which counts."""
        if params.transfer_id:
            self.kv_transfer = params
        else:
            stats.num_external_queries += len(self.prompt_token_ids)
            stats.num_external_tokens += params.num_tokens


def _num_tokens(completions: Sequence[CompletionOutput]) -> int:
    return sum(len(completion.token_ids) for completion in completions)


def _best(completions: list[CompletionOutput], n: int) -> list[CompletionOutput]:
    """The `n` completions of the highest mean log-probability, best first, if there are more than `n`."""
    if len(completions) <= n:
        return completions

    def negative_mean_logprob(completion: CompletionOutput) -> float:
        return -(completion.cumulative_logprob or 0.0) / max(len(completion.token_ids), 1)

    best = sorted(completions, key=negative_mean_logprob)[:n]
    return [dataclasses.replace(completion, index=index) for index, completion in enumerate(best)]


class CompletionState:
    """One completion: its tokens, its text on the way out, and what has been delivered of both."""

    def __init__(
        self,
        parent: RequestState,
        index: int,
        request_id: str,
        tokenizer: Tokenizer | None,
        detokenizer: Detokenizer | None,
        stop: StopStringStream | None,
    ) -> None:
        self.parent = parent
        self.index = index
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.cumulative_logprob: float | None = None
        if parent.sampling_params.logprobs is not None:
            self.logprobs, self.cumulative_logprob = [], 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.first_token_time_s: float | None = None
        self.last_token_time_s: float | None = None
        self.scheduled_time_s: float | None = None
        self.num_preemptions = 0
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._stop = stop
        self._text_parts: list[str] = []
        self._num_delivered_tokens = 0
        params = parent.sampling_params
        # Nothing is generated: the step computes the prompt, and its token is dropped.
        self.is_prompt_only = params.max_tokens == 0
        self._min_tokens = params.min_tokens
        self._stream_interval = 1 if parent.collector.is_split else params.stream_interval
        self._has_best_logprobs = not params.logprob_token_ids
        self._is_end_shown = params.include_stop_str_in_output

    def note_status(self, status: RequestStatus, time_s: float) -> None:
        """The engine core says that it entered a state."""
        parent = self.parent
        if status is RequestStatus.RUNNING:
            if self.scheduled_time_s is None:
                self.scheduled_time_s = time_s
                if parent.metrics.scheduled_time_s is None:
                    parent.metrics.scheduled_time_s = time_s
                    parent.begin_s = dataclasses.replace(parent.step_times)
        elif status in (RequestStatus.PREEMPTED, RequestStatus.SWAPPED, RequestStatus.YIELDED):
            self.num_preemptions += 1
            parent.metrics.num_preemptions += 1
        elif status is RequestStatus.WAITING and parent.metrics.queued_time_s is None:
            parent.metrics.queued_time_s = time_s

    def append_all(self, output: EngineCoreOutput) -> bool:
        """Appends the tokens of a step; True if a stop string ends the completion, and tokens after it are dropped."""
        last = len(output.new_token_ids) - 1
        hidden = last if output.finish_reason is FinishReason.STOP and not self._is_end_shown else -1
        for position, token_id in enumerate(output.new_token_ids):
            self.token_ids.append(token_id)
            if output.logprobs is not None:  # asked for, or needed to choose the best completions
                self._append_logprobs(output.logprobs[position])
            if self._detokenizer is not None and position != hidden:
                text = self._detokenizer.append(token_id)
                if self._stop is None:
                    self._text_parts.append(text)
                elif text and self._show(text, self._stop):
                    return True
        return False

    def _append_logprobs(self, logprobs: TokenLogprobs | None) -> None:
        if logprobs is None:
            return
        logprob = max(logprobs.logprobs[0], LOWEST_LOGPROB)
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprob
        if self.logprobs is not None:
            self.logprobs.append(logprobs_dict(logprobs, self._tokenizer, are_best=self._has_best_logprobs))

    def finish(self, finish_reason: str, stop_reason: int | str | None) -> None:
        """Ends it, and lets out what was held back: part of a character, then what looked like a stop string."""
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if self._detokenizer is None:
            return
        text, stop = self._detokenizer.finish(), self._stop
        if stop is None:
            self._text_parts.append(text)
        elif text and self._show(text, stop):
            self.finish_reason, self.stop_reason = "stop", stop.matched
        else:
            self._text_parts.append(stop.finish())

    def finish_with_stop_string(self) -> None:
        """Ends it at the stop string just found."""
        self.finish_reason, self.stop_reason = "stop", self._stop.matched if self._stop else None

    def output(self) -> CompletionOutput | None:
        """The output to deliver now; None where a delta is too short."""
        if self.parent.output_kind is not RequestOutputKind.DELTA:
            self._join()
            token_ids, logprobs, text = list(self.token_ids), self.logprobs, "".join(self._text_parts)
        else:
            start = self._num_delivered_tokens
            token_ids, logprobs = self.token_ids[start:], self.logprobs
            if start and self.finish_reason is None and len(token_ids) < self._stream_interval:
                return None
            if not token_ids and self.finish_reason is None:
                return None
            logprobs = None if logprobs is None else logprobs[start:]
            text = "".join(self._text_parts)
            self._text_parts.clear()
            self._num_delivered_tokens = len(self.token_ids)
        return CompletionOutput(
            self.index, text, token_ids, self.cumulative_logprob, logprobs and list(logprobs),
            self.finish_reason, self.stop_reason, self.parent.lora_request,
        )  # fmt: skip

    def _join(self) -> None:
        if len(self._text_parts) > 1:
            self._text_parts[:] = ["".join(self._text_parts)]

    def _show(self, text: str, stop: StopStringStream) -> bool:
        """Adds text as far as it cannot begin a stop string; True if one is complete."""
        if len(self.token_ids) <= self._min_tokens:
            self._text_parts.append(stop.append_unsearched(text))
            return False
        self._text_parts.append(stop.append(text))
        return stop.matched is not None


def count_tokens(
    completion: CompletionState, num_tokens: int, timestamp_s: float, stats: IterationStats,
    waiting: dict[str, RequestState],
) -> None:  # fmt: skip
    """Counts the tokens of an output; with its first one a request leaves those that wait."""
    metrics = completion.parent.metrics
    stats.num_generation_tokens += num_tokens
    metrics.num_generation_tokens += num_tokens
    if completion.last_token_time_s is None:
        completion.first_token_time_s = timestamp_s
        stats.time_to_first_tokens_s.append(timestamp_s - metrics.arrival_time_s)
        if metrics.first_token_time_s is None:
            metrics.first_token_time_s = timestamp_s
            del waiting[completion.parent.request_id]
            stats.num_prompt_tokens += len(completion.parent.prompt_token_ids)
            if completion.parent.on_first_token is not None:
                completion.parent.on_first_token(timestamp_s - metrics.arrival_time_s)
    else:
        stats.inter_token_latencies_s.append(timestamp_s - completion.last_token_time_s)
    completion.last_token_time_s = metrics.last_token_time_s = timestamp_s
