"""What a running server tells about itself: spans, trace lines, steps, timings, and every name of the dashboard."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import runpy
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmstack_demo_model import model_path

DASHBOARD = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "llmstack.json"
PAGE = DASHBOARD.parents[1] / "observability.md"
TOOL = DASHBOARD.parents[2] / "tools" / "make_dashboard.py"
needs_otel = pytest.mark.skipif(importlib.util.find_spec("opentelemetry") is None, reason="needs llmstack-server[otel]")
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


class Collector(ThreadingHTTPServer):
    """An OpenTelemetry collector over HTTP that keeps the spans it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CollectorHandler)
        self.spans: list[Any] = []
        self.resources: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def spans_of(self, request_id: str) -> list[Any]:
        parents = [span for span in self.spans if attributes(span).get("gen_ai.request.id") == request_id]
        ids = {span.span_id for span in parents}
        return [span for span in self.spans if span.span_id in ids or span.parent_span_id in ids]


class _CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resources.append(sent.resource)
            self.server.spans += [span for scope in sent.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        collector.server_close()
        thread.join()


def attributes(carrier: Any) -> dict[str, Any]:
    found = {}
    for entry in carrier.attributes:
        kind = entry.value.WhichOneof("value")
        value = getattr(entry.value, kind)
        found[entry.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@needs_otel
def test_a_request_becomes_one_span_with_one_below_it_per_stage(serve: Callable[..., Any]) -> None:
    arguments = ("--otlp-traces-endpoint", "--collect-detailed-traces", "all")
    with collecting() as collector:
        with serve(arguments[0], collector.url, *arguments[1:], env={"OTEL_SERVICE_NAME": "stories"}) as server:
            header = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
            _, answer, headers = server.post("/v1/completions", COMPLETION, header)
            server.post("/v1/completions", {"prompt": 7})
        spans = collector.spans_of(answer["id"])
        named = {span.name: span for span in spans}
        assert list(named) == ["admission", "queue", "prefill", "decode", "respond", "llm_request"]
        check_stages(named)
        whole = named["llm_request"]
        assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
        check_attributes(attributes(whole), headers["x-request-id"])
        assert attributes(collector.resources[0])["service.name"] == "stories"
        assert len(collector.spans) == len(spans)  # what never came to the engine has none


def check_stages(named: dict[str, Any]) -> None:
    """They follow each other without a gap, and fill the whole."""
    whole = named["llm_request"]
    stages = [span for name, span in named.items() if name != "llm_request"]
    assert all(span.parent_span_id == whole.span_id and span.trace_id == whole.trace_id for span in stages)
    ends = [whole.start_time_unix_nano, *(span.end_time_unix_nano for span in stages)]
    assert [span.start_time_unix_nano for span in stages] == ends[:-1]
    assert ends[-1] == whole.end_time_unix_nano
    assert ends == sorted(ends)


def check_attributes(found: dict[str, Any], http_request_id: str) -> None:
    assert found["gen_ai.usage.completion_tokens"] == 5
    assert found["gen_ai.usage.prompt_tokens"] > 1
    assert found["gen_ai.request.max_tokens"] == 5
    assert found["gen_ai.response.model"] == "llmstack-demo"
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["llmstack.http_request_id"] == http_request_id
    latency = {name.rpartition(".")[2]: value for name, value in found.items() if name.startswith("gen_ai.latency")}
    inference = latency["time_in_model_prefill"] + latency["time_in_model_decode"]
    assert latency["time_in_model_inference"] == pytest.approx(inference)
    assert latency["time_in_queue"] + inference < latency["e2e"]
    assert 0 < latency["time_in_scheduler"] < latency["time_in_model_inference"]
    assert 0 < latency["time_in_model_execute"] <= latency["time_in_model_inference"] * 1.5


@needs_otel
def test_a_collector_that_is_gone_has_no_effect(launch: Callable[..., Any]) -> None:
    with collecting() as collector:
        url = collector.url
    server = launch("--otlp-traces-endpoint", url, env={"OTEL_EXPORTER_OTLP_TIMEOUT": "60"})
    server.wait_until_ready()
    assert server.post("/v1/completions", COMPLETION)[0] == 200
    assert server.stop(timeout_s=30) == 0  # though the exporter would try for a minute
    assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def telling_server(serve: Callable[..., Any]) -> Iterator[Any]:
    """A server that writes trace lines, and sends timings along."""
    with serve("--enable-per-request-metrics", env={"LLMSTACK_TRACE": "1"}) as server:
        yield server


def test_the_lines_of_a_trace_follow_a_request_through_both_processes(telling_server: Any) -> None:
    _, answer, headers = telling_server.post("/v1/completions", COMPLETION)
    lines = telling_server.wait_for(
        lambda: whole_trace(telling_server.log, headers["x-request-id"]), "end of the trace"
    )
    request_id = f"{answer['id']}-0"
    stages = [
        r"\(http\) \S+: POST /v1/completions",
        r"\(input_processor\) admitted a prompt",
        rf"\(serving\) \S+: {request_id} of",
        rf"\(scheduler\) {request_id}: WAITING",
        rf"\(scheduler\) {request_id}: RUNNING",
        rf"\(model_runner\) {request_id}: prefill",
        r"\(engine_core\) step \d+ done",
        rf"\(output_processor\) {request_id}: 1 tokens",
        rf"\(output_processor\) {request_id}: all completions have ended",
        r"\(http\) \S+: sent \d+ bytes",
        r"\(http\) \S+: 200 after",
    ]
    positions = [next(n for n, line in enumerate(lines) if re.search(stage, line)) for stage in stages]
    assert positions == sorted(positions)
    assert all(re.match(r"\[TRACE\] \(\w+\) ", line) for line in lines)


def whole_trace(log: str, http_request_id: str) -> list[str]:
    lines = [line for line in log.splitlines() if line.startswith("[TRACE]")]
    return lines if any(f"{http_request_id}: 200 after" in line for line in lines) else []


def test_steps_and_timings_can_be_read(telling_server: Any) -> None:
    server = telling_server
    _, answer, _ = server.post("/v1/completions", COMPLETION)
    check_timings(answer["metrics"])
    several = server.post("/v1/completions", {**COMPLETION, "n": 2})[1]
    assert "metrics" not in several
    steps = server.wait_for(lambda: ended(server.get_json("/steps"), f"{answer['id']}-0"), "end of a request")
    events = [event["status"] for event in steps["events"] if event["id"] == f"{answer['id']}-0"]
    assert events == ["WAITING", "RUNNING", "FINISHED_LENGTH_CAPPED"]
    rows = [row for step in steps["steps"] for row in step["requests"] if row["id"] == f"{answer['id']}-0"]
    assert len(rows) == 5
    assert [row["num_scheduled_tokens"] for row in rows[1:]] == [1] * 4
    last = steps["steps"][-1]["step"]
    assert server.get_json(f"/steps?after={last}")["steps"] == []
    assert server.get_status("/steps?after=-1") == 400


def ended(steps: dict[str, Any], request_id: str) -> dict[str, Any] | None:
    is_over = any(event["id"] == request_id and "FINISHED" in event["status"] for event in steps["events"])
    return steps if is_over else None


def check_timings(timings: dict[str, float]) -> None:
    assert 0 <= timings["queue_time_ms"] < timings["time_to_first_token_ms"]
    assert timings["mean_itl_ms"] == pytest.approx(timings["generation_time_ms"] / 4, abs=0.01)
    assert timings["tokens_per_second"] > 0


def test_every_name_on_the_dashboard_is_exported(demo_server: Any) -> None:
    asked = names_of(json.loads(DASHBOARD.read_text()))
    assert len(asked) > 20
    demo_server.post("/v1/completions", COMPLETION)
    assert asked - exported_names(demo_server) == set()


def test_the_example_of_the_page_prints_the_states_of_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(example.replace('"gpt2"', repr(str(model_path()))), PAGE.name, "exec"), {})
    states = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert states == ["WAITING", "RUNNING", "FINISHED_LENGTH_CAPPED"]


def test_the_dashboard_is_what_its_script_makes() -> None:
    made = runpy.run_path(str(TOOL))["make_dashboard"]()
    assert json.loads(DASHBOARD.read_text()) == made, "run: python tools/make_dashboard.py"


def test_every_panel_has_a_place_and_queries_that_are_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}
    assert len(places) == len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    variables = {variable["name"] for variable in dashboard["templating"]["list"]} | {"__rate_interval"}
    for panel in dashboard["panels"]:
        assert panel["targets"]
        for target in panel["targets"]:
            query = target["expr"]
            assert all(query.count(opening) == query.count(closing) for opening, closing in ("()", "{}", "[]"))
            assert set(re.findall(r"\$(\w+)", query)) <= variables


def names_of(dashboard: dict[str, Any]) -> set[str]:
    """Every name of a metric in the dashboard's queries."""
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    texts += [variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    return {name for text in texts for name in re.findall(r"\b(?:llmstack:|vllm:|http_)\w+", text)}


def exported_names(server: Any) -> set[str]:
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
        text = response.read().decode()
    return {re.split(r"[ {]", line, maxsplit=1)[0] for line in text.splitlines() if not line.startswith("#")}
