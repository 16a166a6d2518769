"""What the front end knows about a request in flight: the request as the user sees it, and each of its completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from llmstack_llm.detokenizer import Detokenizer
from llmstack_llm.output_collector import RequestOutputCollector
from llmstack_llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from llmstack_llm.stop_strings import StopStringStream
from llmstack_llm.tokenizer import Tokenizer
from llmstack_types import (
    EngineCoreRequest,
    RequestOutputKind,
    RequestStatus,
    SamplingParams,
    StepPhases,
    TokenLogprobs,
)

LOWEST_LOGPROB = -9999.0
"""JSON has no negative infinity; vLLM cuts here too."""


def logprobs_dict(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The chosen token first, then the most likely ones with ranks 1, 2, 3 and so on."""
    chosen_id = entry.token_ids[0]
    found: dict[int, Logprob] = {chosen_id: _logprob(chosen_id, entry.logprobs[0], entry.rank, tokenizer)}
    for rank, (token_id, logprob) in enumerate(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True), start=1):
        if token_id != chosen_id:
            found[token_id] = _logprob(token_id, logprob, rank, tokenizer)
    return found


def _logprob(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> Logprob:
    text = None if tokenizer is None else tokenizer.text_of(token_id)
    return Logprob(max(logprob, LOWEST_LOGPROB), rank, text)


class StepTimes:
    """What all steps so far have taken, in seconds.

    Attributes:
        scheduler_s: Choosing batches and taking over their results.
        model_s: Computing them.
    """

    def __init__(self) -> None:
        self.scheduler_s = 0.0
        self.model_s = 0.0

    def add(self, phases: StepPhases) -> None:
        """Takes in one step."""
        self.scheduler_s += phases.schedule_s + phases.update_s
        self.model_s += phases.execute_s


class RequestState:
    """One request as the user sees it: its prompt, its stream, and how many of its completions go on.

    Attributes:
        completion_ids: Engine request ids of its completions, by index.
        max_num_generation_tokens: Tokens of the longest of its completions that have ended.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: Sequence[EngineCoreRequest],
        sampling_params: SamplingParams,
        collector: RequestOutputCollector,
        step_times: StepTimes | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = requests[0].prompt_token_ids
        self.sampling_params = sampling_params
        self.collector = collector
        self.completion_ids = [request.request_id for request in requests]
        self.metrics = RequestMetrics(requests[0].arrival_time_s)
        self.num_unfinished = len(requests)
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.has_new_prompt_logprobs = False
        self.max_num_generation_tokens = 0
        self._step_times = step_times or StepTimes()
        self._scheduler_base_s = self._model_base_s = 0.0
        self.finished_completions: dict[int, CompletionOutput] = {}

    @property
    def output_kind(self) -> RequestOutputKind:
        """What each output holds."""
        return self.sampling_params.output_kind

    def deliver(self, completion: CompletionOutput) -> bool:
        """Puts one completion's news into the stream; False where `FINAL_ONLY` waits for the others."""
        if self.output_kind is RequestOutputKind.FINAL_ONLY:
            if not completion.finished():
                return False
            self.finished_completions[completion.index] = completion
            if self.num_unfinished:
                return False
            completions = [self.finished_completions[index] for index in sorted(self.finished_completions)]
            best = _best(completions, self.sampling_params.n)
            self._put(best, _num_tokens(completions) - _num_tokens(best))
        else:
            self._put([completion])
        return True

    @property
    def last_progress_s(self) -> float:
        """When something last happened to it."""
        metrics = self.metrics
        return max(metrics.arrival_time_s, metrics.scheduled_time_s or 0.0, metrics.last_token_time_s or 0.0)

    def note_scheduled(self, time_s: float) -> None:
        """The first of its completions got a place in a step."""
        if self.metrics.scheduled_time_s is None:
            self.metrics.scheduled_time_s = time_s
            self._scheduler_base_s = self._step_times.scheduler_s
            self._model_base_s = self._step_times.model_s

    def _put(self, completions: list[CompletionOutput], num_dropped_tokens: int = 0) -> None:
        is_delta = self.output_kind is RequestOutputKind.DELTA
        if self.num_unfinished == 0:
            self.metrics.scheduler_time_s = self._step_times.scheduler_s - self._scheduler_base_s
            self.metrics.model_time_s = self._step_times.model_s - self._model_base_s
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
            )
        )


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
        self._num_delivered_parts = 0
        self._num_delivered_tokens = 0

    @property
    def is_prompt_only(self) -> bool:
        """Nothing was to be generated; the step computed the prompt, and its token is dropped."""
        return self.parent.sampling_params.max_tokens == 0

    def note_status(self, status: RequestStatus, time_s: float) -> None:
        """The engine core says that it entered a state."""
        parent = self.parent
        if status is RequestStatus.RUNNING:
            if self.scheduled_time_s is None:
                self.scheduled_time_s = time_s
                parent.note_scheduled(time_s)
        elif status in (RequestStatus.PREEMPTED, RequestStatus.SWAPPED):
            self.num_preemptions += 1
            parent.metrics.num_preemptions += 1
        elif status is RequestStatus.WAITING and parent.metrics.queued_time_s is None:
            parent.metrics.queued_time_s = time_s

    def append(self, token_id: int, logprobs: TokenLogprobs | None, *, is_text: bool = True) -> bool:
        """Takes over one token; True if a stop string is complete with it, and the completion ends here."""
        self.token_ids.append(token_id)
        if logprobs is not None:  # asked for, or needed to choose the best completions
            logprob = max(logprobs.logprobs[0], LOWEST_LOGPROB)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprob
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs_dict(logprobs, self._tokenizer))
        if self._detokenizer is None or not is_text:
            return False
        text = self._detokenizer.append(token_id)
        return bool(text) and self._show(text)

    def finish(self, finish_reason: str, stop_reason: int | str | None) -> None:
        """Ends it, and lets out what was held back: part of a character, then what looked like a stop string."""
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if self._detokenizer is None:
            return
        text = self._detokenizer.finish()
        if text and self._show(text):
            self.finish_reason, self.stop_reason = "stop", self._stop.matched if self._stop else None
        elif self._stop is not None:
            self._text_parts.append(self._stop.finish())

    def finish_with_stop_string(self) -> None:
        """Ends it at the stop string just found."""
        self.finish_reason, self.stop_reason = "stop", self._stop.matched if self._stop else None

    def output(self) -> CompletionOutput | None:
        """What is to be delivered now; None where a delta has nothing to say."""
        if self.parent.output_kind is RequestOutputKind.DELTA:
            return self._delta()
        self._join()
        return self._completion("".join(self._text_parts), list(self.token_ids), self.logprobs and list(self.logprobs))

    def _delta(self) -> CompletionOutput | None:
        token_ids = self.token_ids[self._num_delivered_tokens :]
        wanted = self.parent.sampling_params.stream_interval if self._num_delivered_tokens else 1
        if len(token_ids) < wanted and self.finish_reason is None:
            return None
        logprobs = None if self.logprobs is None else self.logprobs[self._num_delivered_tokens :]
        text = "".join(self._text_parts)
        self._text_parts.clear()
        self._num_delivered_tokens = len(self.token_ids)
        return self._completion(text, token_ids, logprobs)

    def _completion(
        self, text: str, token_ids: list[int], logprobs: list[dict[int, Logprob]] | None
    ) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _join(self) -> None:
        if len(self._text_parts) > 1:
            self._text_parts[:] = ["".join(self._text_parts)]

    def _show(self, text: str) -> bool:
        if self._stop is None:
            self._text_parts.append(text)
            return False
        if len(self.token_ids) <= self.parent.sampling_params.min_tokens:
            self._text_parts.append(self._stop.append_unsearched(text))
            return False
        self._text_parts.append(self._stop.append(text))
        return self._stop.matched is not None
