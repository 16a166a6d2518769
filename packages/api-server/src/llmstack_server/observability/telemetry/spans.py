"""OpenTelemetry spans of a request: one for the whole, with a child per stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from llmstack_server.observability.telemetry.middleware import HttpObserver
from llmstack_server.observability.telemetry.request_trace import PromptTrace, RequestTrace

SPAN_NAME = "llm_request"
_NANOSECONDS = 1_000_000_000
_PROPAGATOR = TraceContextTextMapPropagator()

Attributes = dict[str, Any]
Stage = tuple[str, float, float]


class SpanObserver(HttpObserver):
    """Makes the spans of a request after it has ended, from the times of its trace."""

    def __init__(self, tracer: Tracer, model_name: str, *, is_detailed: bool = False) -> None:
        """`is_detailed`: Whether spans have the time of the scheduler and of the model."""
        self._tracer = tracer
        self._model_name = model_name
        self._is_detailed = is_detailed

    def on_end(self, trace: RequestTrace, end_s: float) -> None:
        """Makes the spans of a request that reached the engine."""
        if not trace.prompts:
            return
        at = _wall_clock(end_s)
        whole = self._tracer.start_span(
            SPAN_NAME,
            context=_PROPAGATOR.extract(trace.headers),
            kind=SpanKind.SERVER,
            start_time=at(trace.start_s),
            attributes=self._attributes(trace, end_s),
        )
        if trace.error is not None:
            whole.set_status(Status(StatusCode.ERROR, trace.error))
        within = set_span_in_context(whole)
        for prompt in trace.prompts:
            self._add_stages(within, trace, prompt, end_s, at)
        whole.end(at(end_s))

    def _add_stages(
        self, within: Context, trace: RequestTrace, prompt: PromptTrace, end_s: float, at: Callable[[float], int]
    ) -> None:
        attributes = {"gen_ai.request.id": prompt.request_id}
        for name, start_s, stage_end_s in stages_of(prompt, trace.start_s, end_s):
            span: Span = self._tracer.start_span(name, within, start_time=at(start_s), attributes=attributes)
            span.end(at(stage_end_s))

    def _attributes(self, trace: RequestTrace, end_s: float) -> Attributes:
        prompts, first = trace.prompts, trace.prompts[0]
        timings = [prompt.timings for prompt in prompts if prompt.timings is not None]
        found: Attributes = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": _shared_id(first.request_id),
            "gen_ai.usage.prompt_tokens": sum(prompt.num_prompt_tokens for prompt in prompts),
            "gen_ai.usage.completion_tokens": sum(each.num_generation_tokens for each in timings),
            "gen_ai.latency.e2e": end_s - trace.start_s,
            "http.request.method": trace.method,
            "url.path": trace.path,
            "http.response.status_code": trace.status,
            "llmstack.http_request_id": trace.http_request_id,
            "llmstack.num_prompts": trace.num_prompts,
        }
        if first.sampling_params is not None:
            params = first.sampling_params
            reasons = [reason for prompt in prompts for reason in prompt.finish_reasons]
            found |= {
                "gen_ai.request.n": params.n, "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p, "gen_ai.usage.num_sequences": params.n * trace.num_prompts,
                "gen_ai.response.finish_reasons": reasons,
            }  # fmt: skip
            if params.max_tokens is not None:
                found["gen_ai.request.max_tokens"] = params.max_tokens
        return found | self._latencies(first, trace.start_s)

    def _latencies(self, prompt: PromptTrace, start_s: float) -> Attributes:
        """Latencies of the first prompt, in seconds; unknown ones are left out."""
        timings = prompt.timings
        if timings is None:
            return {}
        scheduled_s, first_s, last_s = timings.scheduled_time_s, timings.first_token_time_s, timings.last_token_time_s
        found: Attributes = {
            "gen_ai.latency.time_to_first_token": _between(start_s, first_s),
            "gen_ai.latency.time_in_queue": _between(timings.arrival_time_s, scheduled_s),
            "gen_ai.latency.time_in_model_prefill": _between(scheduled_s, first_s),
            "gen_ai.latency.time_in_model_decode": _between(first_s, last_s),
            "gen_ai.latency.time_in_model_inference": _between(scheduled_s, last_s),
            "llmstack.num_preemptions": timings.num_preemptions,
        }
        if self._is_detailed:
            found["gen_ai.latency.time_in_scheduler"] = timings.scheduler_time_s
            found["gen_ai.latency.time_in_model_execute"] = timings.model_time_s
        return {name: value for name, value in found.items() if value is not None}


def stages_of(prompt: PromptTrace, start_s: float, end_s: float) -> list[Stage]:
    """Name, start and end of each stage that a prompt reached, in order and without gaps.

    `start_s`, `end_s`: Start and end of the whole request.
    """
    timings = prompt.timings
    names = ["admission"]
    starts = [start_s]
    stages: list[tuple[str, float | None]] = [("engine", prompt.start_s)]
    if timings is not None:
        stages = [
            ("queue", timings.arrival_time_s), ("prefill", timings.scheduled_time_s),
            ("decode", timings.first_token_time_s), ("respond", timings.last_token_time_s),
        ]  # fmt: skip
    for name, begin_s in stages:
        if begin_s is not None:
            names.append(name)
            starts.append(begin_s)
    return list(zip(names, starts, [*starts[1:], end_s], strict=True))


def _wall_clock(now_s: float) -> Callable[[float], int]:
    """A conversion from monotonic seconds to nanoseconds since 1970."""
    offset_ns = time.time_ns() - int(time.monotonic() * _NANOSECONDS)
    return lambda time_s: int(time_s * _NANOSECONDS) + offset_ns


def _shared_id(request_id: str) -> str:
    """The id of the answer; the engine's ids extend it by the prompt's number."""
    stem, _, number = request_id.rpartition("-")
    return stem if stem and number.isdigit() else request_id


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
