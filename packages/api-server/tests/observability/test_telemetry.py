"""What is noted of requests, the spans it becomes, and the absence of both by default."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from llmstack_llm.outputs.request_output import RequestMetrics
from llmstack_server.app import build_app
from llmstack_server.observability.telemetry.middleware import HttpObserver
from llmstack_server.observability.telemetry.open import Telemetry, open_telemetry
from llmstack_server.observability.telemetry.request_trace import MAX_PROMPTS, PromptTrace, RequestTrace
from llmstack_server.options.errors import ServeError
from llmstack_server.options.observability import ObservabilityConfig
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call, ready_state

pytest.importorskip("opentelemetry.sdk", reason="needs llmstack-server[otel]")

from llmstack_server.observability.telemetry.otlp import protocol_of
from llmstack_server.observability.telemetry.spans import SpanObserver, stages_of

BODY = {"prompt": "abc", "max_tokens": 3}
TIMINGS = RequestMetrics(1.0, 3.0, 6.0, 4, 1.5, 2.0, 1, 0.25, 2.5)


class StageObserver(HttpObserver):
    """Keeps the stages and traces that it receives."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.traces: list[RequestTrace] = []

    def on_request(self, trace: RequestTrace) -> None:
        self.stages.append(f"{trace.method} {trace.path}")

    def on_prompt(self, trace: RequestTrace, prompt: PromptTrace) -> None:
        self.stages.append(f"prompt of {prompt.num_prompt_tokens}")

    def on_sent(self, trace: RequestTrace, num_bytes: int) -> None:
        self.stages.append("sent")

    def on_end(self, trace: RequestTrace, end_s: float) -> None:
        self.stages.append(f"end {trace.error or trace.status}")
        self.traces.append(trace)


def observed_state(observer: StageObserver, engine: FakeEngineClient) -> ServerState:
    state = ready_state(engine)
    state.telemetry = Telemetry((observer,), observer.on_prompt, lambda: None)
    engine.add_observer(state.telemetry.engine_observer())
    return state


async def test_stages_are_observed_in_order() -> None:
    observer = StageObserver()
    app = build_app(observed_state(observer, FakeEngineClient()))
    answer = await call(app, "POST", "/v1/completions", {**BODY, "stream": True})
    assert observer.stages == ["POST /v1/completions", "prompt of 3", *["sent"] * 4, "end 200"]
    (trace,) = observer.traces
    assert trace.http_request_id == answer.headers["x-request-id"]
    assert trace.prompts[0].request_id == answer.events()[0]["id"] + "-0"
    assert trace.prompts[0].finish_reasons == ["length"]


async def test_a_refused_request_reaches_no_engine() -> None:
    observer = StageObserver()
    app = build_app(observed_state(observer, FakeEngineClient()))
    await call(app, "POST", "/v1/completions", {"prompt": 7})
    assert observer.stages == ["POST /v1/completions", "end InvalidRequestError"]
    assert not observer.traces[0].prompts


async def test_a_client_that_leaves_ends_the_request_in_the_engine() -> None:
    observer, engine = StageObserver(), FakeEngineClient(step_delay_s=0.01)
    app = build_app(observed_state(observer, engine))
    await call(app, "POST", "/v1/completions", {**BODY, "max_tokens": 100, "stream": True}, disconnect_after_parts=1)
    assert observer.stages[-1] == "end ClientDisconnected"
    assert engine.aborted_request_ids == [observer.traces[0].prompts[0].request_id]
    assert observer.traces[0].prompts[0].end_s is not None


async def test_of_a_thousand_prompts_some_are_noted() -> None:
    observer = StageObserver()
    app = build_app(observed_state(observer, FakeEngineClient()))
    await call(app, "POST", "/v1/completions", {"prompt": ["ab"] * (MAX_PROMPTS + 6), "max_tokens": 1})
    assert observer.traces[0].num_prompts == MAX_PROMPTS + 6
    assert len(observer.traces[0].prompts) == MAX_PROMPTS


def test_stages_follow_each_other_without_a_gap() -> None:
    prompt = PromptTrace("r", 3, 0.5, timings=TIMINGS)
    assert stages_of(prompt, 0.0, 7.0) == [
        ("admission", 0.0, 1.0),
        ("queue", 1.0, 2.0),
        ("prefill", 2.0, 3.0),
        ("decode", 3.0, 6.0),
        ("respond", 6.0, 7.0),
    ]


def test_a_request_that_never_ran_has_the_stages_it_came_to() -> None:
    assert stages_of(PromptTrace("r", 3, 0.5), 0.0, 7.0) == [("admission", 0.0, 0.5), ("engine", 0.5, 7.0)]
    waiting = PromptTrace("r", 3, 0.5, timings=RequestMetrics(1.0))
    assert stages_of(waiting, 0.0, 7.0) == [("admission", 0.0, 1.0), ("queue", 1.0, 7.0)]


@pytest.fixture
def exporter() -> Iterator[Any]:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    yield exporter
    exporter.shutdown()


def observer_into(exporter: Any, *, is_detailed: bool = False) -> SpanObserver:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return SpanObserver(provider.get_tracer("test"), "m", is_detailed=is_detailed)


def test_a_request_that_fails_is_marked(exporter: Any) -> None:
    trace = RequestTrace("h", "POST", "/v1/completions", 0.0, error="RequestFailedError", status=500)
    trace.begin_prompt(PromptTrace("cmpl-1-0", 3, 0.5))
    observer_into(exporter).on_end(trace, 7.0)
    *stages, whole = exporter.get_finished_spans()
    assert [span.name for span in stages] == ["admission", "engine"]
    assert (whole.status.status_code.name, whole.status.description) == ("ERROR", "RequestFailedError")
    assert whole.attributes["gen_ai.request.id"] == "cmpl-1"


@pytest.mark.parametrize("is_detailed", [False, True])
def test_spans_contain_details_where_they_were_asked_for(exporter: Any, is_detailed: bool) -> None:
    trace = RequestTrace("h", "POST", "/v1/completions", 0.5, status=200)
    trace.begin_prompt(PromptTrace("cmpl-1-0", 3, 0.5, timings=TIMINGS))
    observer_into(exporter, is_detailed=is_detailed).on_end(trace, 7.0)
    found = exporter.get_finished_spans()[-1].attributes
    assert found["gen_ai.latency.time_to_first_token"] == 2.5
    assert found["gen_ai.latency.time_in_queue"] == 1.0
    assert found["gen_ai.latency.time_in_model_inference"] == 4.0
    assert found.get("gen_ai.latency.time_in_model_execute") == (2.5 if is_detailed else None)
    assert found.get("gen_ai.latency.time_in_scheduler") == (0.25 if is_detailed else None)


def test_a_request_without_the_engine_has_no_span(exporter: Any) -> None:
    observer_into(exporter).on_end(RequestTrace("h", "GET", "/v1/models", 0.0), 1.0)
    assert exporter.get_finished_spans() == ()


def test_a_broken_header_begins_a_trace_of_our_own(exporter: Any) -> None:
    trace = RequestTrace("h", "POST", "/v1/completions", 0.0, {"traceparent": "nonsense"})
    trace.begin_prompt(PromptTrace("cmpl-1-0", 3, 0.5))
    observer_into(exporter).on_end(trace, 1.0)
    assert exporter.get_finished_spans()[-1].parent is None


@pytest.mark.parametrize(
    ("endpoint", "variables", "protocol"),
    [
        ("http://host:4318/v1/traces", {}, "http/protobuf"),
        ("grpc://host:4317", {}, "grpc"),
        ("http://host:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf"),
        ("http://host:4318/v1/traces", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "grpc"),
    ],
)
def test_the_protocol_is_the_environments_or_the_addresss(
    endpoint: str, variables: dict[str, str], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert protocol_of(endpoint) == protocol


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ServeError, match="http/json"):
        protocol_of("http://host:4318/v1/traces")


def test_where_nothing_was_asked_for_there_is_nothing() -> None:
    assert open_telemetry(ObservabilityConfig(), "m") is None
    state = ready_state(FakeEngineClient())
    assert state.telemetry is None
    assert all("Observing" not in entry.cls.__name__ for entry in build_app(state).user_middleware)


def test_opentelemetrys_sdk_is_imported_where_it_was_asked_for_only() -> None:
    script = (
        "import sys\n"
        "import llmstack_server.serving.server, llmstack_server.serving.api_process\n"
        "from llmstack_server.options.observability import ObservabilityConfig\n"
        "from llmstack_server.observability.telemetry.open import open_telemetry\n"
        "open_telemetry(ObservabilityConfig(), 'm')\n"
        "print([name for name in ('opentelemetry.sdk', 'llmstack_engine_core.trace', 'grpc') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ServeError, match=r"llmstack-server\[otel\]"):
        open_telemetry(ObservabilityConfig(otlp_traces_endpoint="http://localhost:1/v1/traces"), "m")
