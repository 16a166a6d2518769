"""The pooling requests in flight, as the front end knows them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from llmstack_llm.outputs.collector import OutputCollector
from llmstack_llm.outputs.stats import FinishedRequestStats, IterationStats
from llmstack_llm.pooling.outputs import PoolingOutput, PoolingRequestOutput
from llmstack_llm.request_errors import failure_of
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    RequestFailedError,
    RequestStatus,
)

PoolingCollector = OutputCollector[PoolingRequestOutput]


@dataclass(slots=True)
class _State:
    request: EngineCoreRequest
    prompt: str | None
    collector: PoolingCollector
    on_end: Callable[[], None] | None = None
    scheduled_time_s: float | None = None

    @property
    def _num_vectors(self) -> int | None:
        params = self.request.pooling_params
        is_per_token = params is not None and params.task is not None and params.task.is_per_token
        return len(self.request.prompt_token_ids) if is_per_token else None

    def output(self, pooled: bytes | None, finish_reason: FinishReason, num_cached_tokens: int) -> PoolingRequestOutput:
        return PoolingRequestOutput(
            self.request.request_id,
            self.prompt,
            self.request.prompt_token_ids,
            PoolingOutput(array("f")) if pooled is None else PoolingOutput.from_bytes(pooled, self._num_vectors),
            finish_reason.value,
            num_cached_tokens=num_cached_tokens,
        )


class PoolingStates:
    """The pooling requests in flight, each with a collector for one output or one error.

    Attributes:
        request_id_to_state: The requests by their ids.
    """

    def __init__(self) -> None:
        self.request_id_to_state: dict[str, _State] = {}

    def __len__(self) -> int:
        return len(self.request_id_to_state)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.request_id_to_state

    def add(
        self, prompt: str | None, request: EngineCoreRequest, on_end: Callable[[], None] | None = None
    ) -> PoolingCollector:
        """Registers a request, whose id is free; its output goes into the collector. `on_end`: Called at its end."""
        collector = PoolingCollector()
        self.request_id_to_state[request.request_id] = _State(request, prompt, collector, on_end)
        return collector

    def _take(self, request_id: str) -> _State | None:
        """The request, which ends."""
        state = self.request_id_to_state.pop(request_id, None)
        if state is not None and state.on_end is not None:
            state.on_end()
        return state

    def process(self, output: EngineCoreOutput, timestamp_s: float, stats: IterationStats) -> bool:
        """Applies an output of the engine core; False if there is no request of that id."""
        state = self._take(output.request_id)
        if state is None:
            return False
        if output.finish_reason is FinishReason.ERROR:
            stats.num_failed += 1
            stats.num_corrupted += state.scheduled_time_s is not None
            state.collector.put_error(failure_of(output.error))
        elif output.pooled is None:
            state.collector.put_error(RequestFailedError("the engine core returned no vector"))
        else:
            num_cached_tokens = max(output.num_cached_tokens, 0)
            state.collector.put(state.output(output.pooled, FinishReason.STOP, num_cached_tokens))
            _count(state, num_cached_tokens, timestamp_s, stats)
        return True

    def note_status(self, request_id: str, status: RequestStatus, time_s: float) -> None:
        """The engine core says that a request entered a state; an unknown one is ignored."""
        state = self.request_id_to_state.get(request_id)
        if state is not None and status is RequestStatus.RUNNING and state.scheduled_time_s is None:
            state.scheduled_time_s = time_s

    def find_stalled(self, since_s: float, *, counts_waiting: bool, is_encoding: bool) -> list[str]:
        return [
            request_id
            for request_id, state in self.request_id_to_state.items()
            if (state.scheduled_time_s or state.request.arrival_time_s) < since_s
            and (counts_waiting or state.scheduled_time_s is not None)
            and not (is_encoding and state.request.media)
        ]

    def abort(self, request_id: str, *, is_silent: bool) -> bool:
        """Ends a request; its collector gets an output without a vector, unless `is_silent`. False if unknown."""
        state = self._take(request_id)
        if state is not None and not is_silent:
            state.collector.put(state.output(None, FinishReason.ABORT, 0))
        return state is not None

    def fail_all(self, error: Exception) -> None:
        """Ends all of them with an error."""
        for request_id in [*self.request_id_to_state]:
            state = self._take(request_id)
            if state is not None:
                state.collector.put_error(error)


def _count(state: _State, num_cached_tokens: int, timestamp_s: float, stats: IterationStats) -> None:
    request, scheduled_s = state.request, state.scheduled_time_s
    num_prompt_tokens = len(request.prompt_token_ids)
    stats.num_prompt_tokens += num_prompt_tokens
    stats.num_cached_tokens += num_cached_tokens
    stats.finished_requests.append(
        FinishedRequestStats(
            finish_reason=FinishReason.STOP.value,
            e2e_latency_s=timestamp_s - request.arrival_time_s,
            num_prompt_tokens=num_prompt_tokens,
            num_generation_tokens=0,
            num_cached_tokens=num_cached_tokens,
            queue_time_s=None if scheduled_s is None else scheduled_s - request.arrival_time_s,
            prefill_time_s=None if scheduled_s is None else timestamp_s - scheduled_s,
            inference_time_s=None if scheduled_s is None else timestamp_s - scheduled_s,
        )
    )
