"""The answers of every route are what the OpenAPI document says of them."""

from __future__ import annotations

import base64
import copy
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
from engine_core_helpers.steps import step_record
from server_helpers.gaps import GAP_TOKENS
from server_helpers.speech import AlignedEngine, wav

from llmstack_llm import EngineArgs
from llmstack_llm.outputs.stats import IterationStats
from llmstack_server.app import build_app
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.process_options import ProcessConfig
from llmstack_server.options.reload_options import ReloadOptions
from llmstack_server.state.queue_monitor import QueueMonitor
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.web.routes import Content, RouteSpec
from llmstack_types import RequestEvent, RequestStatus, ScheduledRequest, SchedulerStats, StepPhases, StepRecording

OPEN = {"ServerInfo"}  # parts of a server add keys to it
# Another engine core is loaded there; the type of its answer is checked by mypy.
NOT_CALLED = {("post", "/v1/reload")}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
PROMPT = {"prompt": "Hello", "max_tokens": 3}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", PROMPT),
    ("/v1/completions", {**PROMPT, "logprobs": 2, "echo": True, "n": 2, "return_token_ids": True}),
    ("/v1/completions", {**PROMPT, "prompt_logprobs": 1, "stop": "l"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1, "return_prompt_text": True, "service_tier": "auto"}),
    ("/v1/chat/completions/batch", {**CHAT, "messages": [CHAT["messages"], CHAT["messages"]]}),
    ("/v1/completions/render", PROMPT),
    ("/v1/chat/completions/render", CHAT),
    ("/v1/estimate", {"prompt_tokens": 5, "deadline_ms": 100_000}),
    ("/v1/estimate", PROMPT),
    ("/tokenize", {"prompt": "Hello", "return_token_strs": True}),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [72, 105]}),
    ("/api/chat", {"messages": CHAT["messages"], "stream": False, "options": {"num_predict": 3}}),
    ("/api/chat", {"model": "fake"}),
    ("/api/generate", {"prompt": "Hello", "stream": False, "options": {"num_predict": 3}}),
    ("/api/embed", {"input": ["a", "b"]}),
    ("/api/embeddings", {"prompt": "a"}),
    ("/api/show", {"model": "fake"}),
    ("/v1/decisions", {"input": "a", "questions": [
        {"type": "predicate", "instructions": "q"},
        {"type": "choice", "name": "n", "instructions": "q", "choices": [{"value": "x"}, {"value": False}]},
        {"type": "score", "instructions": "q", "levels": [{"label": "x"}, {"label": "y", "description": "z"}]},
    ]}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
    ("/v2/embed", {"texts": ["a"], "input_type": "classification", "embedding_types": ["float", "base64"]}),
    ("/pooling", {"input": "a"}),
    ("/pooling", {"input": "a", "task": "token_embed", "encoding_format": "base64"}),
    ("/classify", {"input": ["a", "b"]}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/v1/score", {"queries": "a", "documents": ["b", "c"]}),
    *((path, {"query": "a", "documents": ["b", "c"]}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    ("/rerank", {"query": "a", "documents": ["b"], "return_documents": False}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}),
    ("/v1/responses", {
        "input": "Hello", "max_output_tokens": 100, "user": "me", "instructions": "Be brief.",
        "reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "top_logprobs": 1,
        "include": ["message.output_text.logprobs"],
        "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
    }),
    ("/v1/responses/input_tokens", {"input": "Hello"}),
    ("/v1/responses/compact", {"input": "Hello"}),
    ("/v1/messages", {**CHAT, "model": "fake"}),
    ("/v1/messages", {**CHAT, "model": "fake", "stop_sequences": ["l"]}),
    ("/v1/messages/count_tokens", {**CHAT, "model": "fake"}),
    ("/invocations", CHAT),
    ("/pause", {}), ("/resume", {}), ("/abort_requests", {}), ("/start_profile", {}), ("/stop_profile", {}),
    ("/log_level?level=info", {}), ("/close_session", {"session_id": "s"}),
]  # fmt: skip
GETS = ["/health", "/ready", "/version", "/load", "/server_info", "/v1/models", "/is_paused", "/is_sleeping",
        "/tokenizer_info", "/steps", "/steps?after=40&engine=0&core=x", "/v1/files?limit=3&order=asc",
        "/v1/batches", "/api/tags", "/api/ps", "/api/version"]  # fmt: skip
SCORING = ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")


def engine_of(num_labels: int) -> FakeEngineClient:
    engine = FakeEngineClient(num_labels=num_labels)
    engine.released = (1, 64)
    rows = [ScheduledRequest("r", 0, 5, [1]), ScheduledRequest("s", 0, 1, [])]
    steps = [step_record(1, rows, num_running=2, num_free_blocks=5, num_blocks=8)]
    engine.last_steps = StepRecording(11.0, steps, [RequestEvent("r", RequestStatus.WAITING, 9.0)])
    return engine


class Checked:
    """An application with every route, whose answers are compared with its document."""

    def __init__(self, folder: Path, num_labels: int = 0, engine: FakeEngineClient | None = None) -> None:
        http = HTTPConfig(enable_control_routes=True, state_dir=str(folder), has_tokenizer_info=True)
        self.engine = engine_of(num_labels) if engine is None else engine
        self.state = ready_state(self.engine, http, chat=ChatOptions(tool_call_parser="hermes"))
        self.state.config = replace(
            self.state.config,
            deployment_secret=b"of all processes",
            processes=ProcessConfig(has_sleep_mode=True),
            engine=EngineArgs("fake", profiler_config={"torch_profiler_dir": "traces"}),
            reload=ReloadOptions(weight_update_dir=str(folder.parent)),
        )
        self.app: Any = build_app(self.state)
        self.document = self.app.openapi()
        self.declared: dict[tuple[str, str], RouteSpec] = {
            (method.lower(), route.path_format): spec
            for route, spec in self.app.table.routes
            for method in route.methods
            if route.include_in_schema
        }
        self.tried: set[tuple[str, str]] = set()

    def with_json(self) -> dict[tuple[str, str], RouteSpec]:
        """The declarations of the operations that answer JSON, by method and path."""
        return {key: spec for key, spec in self.declared.items() if not isinstance(spec.answer, Content)}

    async def ask(self, method: str, path: str, body: Any = None, *, route: str = "", **headers: str) -> Any:
        route, num_admitted = route or path.partition("?")[0], len(self.engine.admitted)
        answer = await call(self.app, method, path, body, headers)
        assert answer.status == 200, (path, answer.body)
        assert len(self.engine.admitted) == num_admitted or self.declared[method.lower(), route].waits, path
        self.tried.add((method.lower(), route))
        content = self.document["paths"][route][method.lower()]["responses"]["200"]["content"]
        schema = closed(content["application/json"]["schema"] | {"components": self.document["components"]})
        jsonschema.validate(answer.json(), schema)
        return answer.json()


def closed(schema: Any) -> Any:
    """The schema without room for keys that it does not name."""
    made = copy.deepcopy(schema)
    for name, one in made["components"]["schemas"].items():
        if "properties" in one and name not in OPEN:
            one["additionalProperties"] = False
    return made


def measure(queue: QueueMonitor) -> None:
    """Steps from which first tokens can be predicted."""
    for number in range(40):
        num_tokens, seconds = 1 + 100 * (number % 3), 0.001 + 0.0005 * (number % 3)
        stats = SchedulerStats(number + 1, num_running=1, num_scheduled_rows=1, num_scheduled_tokens=num_tokens)
        phases = StepPhases(0.0, seconds, 0.0)
        queue.record(stats, IterationStats(timestamp_s=time.monotonic(), phases=phases))


@asynccontextmanager
async def server(folder: Path, num_labels: int = 0, engine: FakeEngineClient | None = None) -> AsyncIterator[Checked]:
    folder.mkdir(mode=0o700)  # noqa: ASYNC240 (a test)
    made = Checked(folder, num_labels, engine)
    measure(made.state.queue)
    try:
        yield made
    finally:
        for end in made.state.at_end:
            await end()


async def ask_of_responses(checked: Checked) -> None:
    body = {"input": "Hello", "max_output_tokens": 16, "background": True}
    made = await checked.ask("POST", "/v1/responses", body)
    below, route = f"/v1/responses/{made['id']}", "/v1/responses/{response_id}"
    await checked.ask("POST", f"{below}/cancel", route=f"{route}/cancel")
    await checked.ask("GET", f"{below}?stream=false", route=route)
    await checked.ask("GET", f"{below}/input_items?limit=5&order=asc", route=f"{route}/input_items")
    await checked.ask("DELETE", below, route=route)


async def ask_of_files(checked: Checked) -> None:
    parts = '--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head = '--edge\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    content = f"{parts}{head}{{}}\r\n--edge--\r\n".encode()
    form = {"content-type": "multipart/form-data; boundary=edge"}
    file = await checked.ask("POST", "/v1/files", content, **form)
    batch_body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await checked.ask("POST", "/v1/batches", batch_body)
    for path in ("/v1/files?limit=3&order=asc", "/v1/batches"):
        assert (await checked.ask("GET", path))["data"]
    route = "/v1/batches/{batch_id}"
    await checked.ask("POST", f"/v1/batches/{batch['id']}/cancel", route=f"{route}/cancel")
    await checked.ask("GET", f"/v1/batches/{batch['id']}", route=route)
    await checked.ask("GET", f"/v1/files/{file['id']}", route="/v1/files/{file_id}")
    await checked.ask("DELETE", f"/v1/files/{file['id']}", route="/v1/files/{file_id}")


async def ask_of_weights(checked: Checked, root: Path) -> None:
    for name in "abc":
        (root / name).mkdir()
    await checked.ask("POST", "/init_weight_transfer_engine", {"init_info": {}})
    await checked.ask("POST", "/update_weights", {"update_info": {"path": "a"}})
    await checked.ask("POST", "/start_weight_update", {})
    await checked.ask("POST", "/update_weights", {"update_info": {"path": "b"}})
    await checked.ask("POST", "/finish_weight_update", {})
    await checked.ask("POST", "/update_weights_from_disk", {"model_path": "c", "weight_version": "3"})
    assert (await checked.ask("GET", "/v1/models"))["data"][0]["weights"]["name"] == "3"


async def ask_of_streams(checked: Checked) -> None:
    answer = await call(checked.app, "POST", "/v1/chat/completions", CHAT, {"idempotency-key": "once"})
    path = f"/v1/streams/{answer.headers['x-llmstack-stream-id']}"
    await checked.ask("GET", path, route="/v1/streams/{stream_id}")


async def ask_of_audio(checked: Checked) -> None:
    url = "data:audio/wav;base64," + base64.b64encode(wav()).decode()
    for name in ("transcriptions", "translations"):
        for response_format in ("json", "verbose_json"):
            body = {"model": "fake", "file_url": url, "response_format": response_format}
            more: dict[str, Any] = {"include": ["logprobs"]} if name == "transcriptions" else {}
            if more and response_format == "verbose_json":
                more["timestamp_granularities"] = ["word", "segment"]
            await checked.ask("POST", f"/v1/audio/{name}", {**body, **more})


async def test_every_answer_has_the_form_of_the_document(tmp_path: Path) -> None:
    tried = set()
    async with server(tmp_path / "generates") as checked:
        for path in GETS:
            await checked.ask("GET", path)
        for path, body in SHAPES:
            if path not in SCORING and path != "/classify":
                await checked.ask("POST", path, body)
        await checked.ask("GET", "/v1/models/fake", route="/v1/models/{model}")
        route = "/v1/requests/{request_id}/explanation"
        await checked.ask("GET", "/v1/requests/r/explanation", route=route)
        await checked.ask("DELETE", "/v1/sessions/s", route="/v1/sessions/{session_id}")
        await ask_of_responses(checked)
        await ask_of_files(checked)
        await ask_of_streams(checked)
        await ask_of_weights(checked, tmp_path)
        tried |= checked.tried
    speaks = AlignedEngine(" And so,", " my fellow Americans")
    async with server(tmp_path / "speaks", engine=speaks) as checked:
        await ask_of_audio(checked)
        tried |= checked.tried
    await speaks.speech.shutdown()
    async with server(tmp_path / "fills", engine=FakeEngineClient(token_names=GAP_TOKENS)) as checked:
        gap = {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}
        await checked.ask("POST", "/infill", gap)
        await checked.ask("POST", "/infill", {**gap, "n_probs": 1, "return_tokens": True, "stop": ["a"]})
        tried |= checked.tried
    for num_labels, paths in ((1, SCORING), (2, ("/classify",))):
        async with server(tmp_path / str(num_labels), num_labels) as checked:
            for path, body in SHAPES:
                if path in paths:
                    await checked.ask("POST", path, body)
            tried |= checked.tried
    assert tried == checked.with_json().keys() - NOT_CALLED


async def test_every_operation_with_json_has_a_schema_and_its_parameters(tmp_path: Path) -> None:
    async with server(tmp_path / "state") as checked:
        described = set()
        for path, operations in checked.document["paths"].items():
            for method, operation in operations.items():
                content = operation["responses"]["200"].get("content", {})
                named = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"}
                assert named >= (checked.declared[method, path].query or {}).keys()
                if "application/json" in content:
                    assert content["application/json"]["schema"], path
                    described.add((method, path))
        assert described == checked.with_json().keys() - NOT_CALLED
        assert len(json.dumps(checked.document)) < 600_000
