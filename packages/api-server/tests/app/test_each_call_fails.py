"""Each call under the API that can fail does fail once: an error by the contract, and other answers as they were."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmstack_engine_core import EngineConfig, SchedulerConfig, build_engine_core
from llmstack_engine_core.testing import EchoModelRunner, EchoOutput
from llmstack_llm import AsyncLLM
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text import detokenizer
from llmstack_llm.text.tokenizer import Tokenizer, load_tokenizer
from llmstack_server.app import build_app
from llmstack_server.testing import Answer, call, ready_state
from llmstack_types import EngineCoreOutputs, EngineCoreRequest, EngineDeadError, ModelRunnerConfig, SchedulerOutput

LIMITS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 64}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
USER = {"role": "user", "content": "Hello"}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once", "max_tokens": 9}),
    ("/v1/completions", {"prompt": "Twice", "max_tokens": 7, "stream": True, "n": 2}),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 8}),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 6, "stream": True}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 5}),
    ("/v1/responses", {"input": "Three", "max_output_tokens": 5, "store": False}),
    ("/v1/embeddings", {"input": ["Four", "Five"]}),
]
KINDS = ("tokenize", "render", "detokenize", "add", "row", "step", "send")


class Faults:
    """Counts the calls of each kind; of one kind the one with the given number, counted from 1, fails."""

    def __init__(self, kind: str = "", number: int = 0) -> None:
        self.kind, self.number = kind, number
        self.counts: Counter[str] = Counter()

    def now(self, kind: str) -> bool:
        self.counts[kind] += 1
        return (kind, self.counts[kind]) == (self.kind, self.number)


class Client(FakeEngineCoreClient):
    """A client of an engine core in this process, over a model runner without a model."""

    def __init__(self, faults: Faults) -> None:
        config = EngineConfig(
            ModelRunnerConfig("echo?vocab_size=257", block_size=4, **LIMITS), runner="echo",
            scheduler=SchedulerConfig(**LIMITS), num_blocks=40, async_scheduling=False, log_level="CRITICAL",
        )  # fmt: skip
        self.core = build_engine_core(config)
        super().__init__(replace(self.core.ready, model_path=""), engine=self)  # type: ignore[arg-type]  # it has what is called of one
        self.faults = faults

    @property
    def request_id_to_state(self) -> bool:
        return self.core.has_unfinished_requests()

    def step(self) -> EngineCoreOutputs:
        if self.faults.now("step"):
            self.die()
            raise EngineDeadError("the engine core has ended")
        return self.core.step()

    async def add_request(self, request: EngineCoreRequest) -> None:
        if self.faults.now("add"):
            raise RuntimeError("the request cannot be sent")
        self._check()
        self.core.add_request(request)
        self._has_work.set()

    async def abort_requests(self, request_ids: Any) -> None:
        self.core.abort_requests(request_ids)


def fail_calls(patch: pytest.MonkeyPatch, faults: Faults) -> None:
    """Puts the faults into the calls of text and of the model runner."""

    def failing(kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if faults.now(kind):
                raise RuntimeError("/secret/path")
            return method(*arguments, **options)

        return run

    execute = EchoModelRunner.execute_model

    def execute_model(runner: EchoModelRunner, scheduled: SchedulerOutput, *masks: Any) -> EchoOutput:
        result = execute(runner, scheduled, *masks)
        for index, request_id in enumerate(result.output.request_ids):
            if faults.now("row"):
                result.output.errors[request_id] = "the row fails"  # type: ignore[index]  # it is a dict
                result.output.sampled_token_ids[index] = []
        return result

    patch.setattr(EchoModelRunner, "execute_model", execute_model)
    for owner, name, kind in (
        (Tokenizer, "encode", "tokenize"), (Tokenizer, "encode_texts", "tokenize"), (ChatTemplate, "render", "render"),
        (detokenizer.ByteLevelDetokenizer, "append", "detokenize"),
    ):  # fmt: skip
        patch.setattr(owner, name, failing(kind, getattr(owner, name)))


async def ask(app: Any, faults: Faults, path: str, body: dict[str, Any]) -> Answer | None:
    """The answer; None if its socket broke, after which nothing can be sent any more."""
    is_gone = False

    async def behind_a_socket(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        async def send_or_fail(message: Mapping[str, Any]) -> None:
            nonlocal is_gone
            is_gone = is_gone or faults.now("send")
            if is_gone:
                raise ConnectionResetError("the client has gone")
            await send(message)

        await app(scope, receive, send_or_fail)

    with contextlib.suppress(ConnectionResetError):
        answer = await call(behind_a_socket, "POST", path, {"model": "fake", **body})
    return None if is_gone else answer


async def run(folder: Path, faults: Faults) -> list[Answer | None]:
    """All requests at once, and afterwards one more, which shows that nothing holds it up."""
    logging.disable(logging.CRITICAL)  # the errors are made
    with pytest.MonkeyPatch.context() as patch:
        client = Client(faults)
        engine = AsyncLLM(load_model_config(str(folder)), client, load_tokenizer(folder), chat_template=TEMPLATE)
        fail_calls(patch, faults)
        state = ready_state(engine, ready=client.ready)
        app = build_app(state)
        answers = await asyncio.gather(*(ask(app, faults, path, body) for path, body in REQUESTS))
        answers.append(await ask(app, faults, *REQUESTS[0]))
        for _ in range(1000):
            if not (client.core.has_unfinished_requests() or state.in_flight.count):
                break
            client._has_work.set()
            await asyncio.sleep(0)
        stats = client.core.stats()
        assert client.is_dead or (stats.num_running, stats.num_waiting) == (0, 0)
        assert client.is_dead or stats.num_free_blocks == stats.num_blocks
        assert state.in_flight.count == 0
        await engine.shutdown()
    logging.disable(logging.NOTSET)
    return answers


def content(answer: Answer) -> Any:
    """What an answer says, without ids and times."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            varying = {"id", "created", "created_at", "completed_at", "item_id"}
            return {key: plain(entry) for key, entry in value.items() if key not in varying}
        return [plain(entry) for entry in value] if isinstance(value, list) else value

    if answer.body.startswith(b"data:"):
        texts: Counter[int] = Counter()
        joined: dict[int, str] = {}
        for event in answer.events():
            for choice in [] if event == "[DONE]" else event["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                joined[choice["index"]] = joined.get(choice["index"], "") + text
                texts[choice["index"]] += 1
        return joined
    return plain(answer.json())


def error_of(answer: Answer) -> dict[str, Any] | None:
    if answer.body.startswith(b"data:"):
        last = answer.events()[-1]
        return None if last == "[DONE]" else last["error"]
    return answer.json().get("error")


def check(expected: list[Answer | None], failed: list[Answer | None], faults: Faults) -> None:
    num_failed = 0
    for whole, answer in zip(expected, failed, strict=True):
        assert whole is not None
        if answer is None:
            num_failed += 1
            assert faults.kind == "send"
            continue
        error = error_of(answer)
        if error is None:
            assert answer.status == 200
            assert content(answer) == content(whole)
            continue
        num_failed += 1
        assert {"message", "type"} <= set(error)
        assert "secret" not in answer.body.decode()
        assert answer.status in ((503, 200) if faults.kind == "step" else (500, 200))
        if answer.status == 200:
            assert answer.body.startswith(b"data:"), "an error after the first byte is an event"
    # The last step has no rows: it only takes those away that have ended.
    # How many events and rows there are depends a little on how the requests meet.
    is_reached = faults.counts[faults.kind] >= faults.number
    assert faults.kind == "step" or num_failed == is_reached, "one failure, one request"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE)


@pytest.mark.parametrize("kind", KINDS)
async def test_some_calls_of_each_kind_fail_and_one_request_ends(folder: Path, kind: str) -> None:
    whole = Faults()
    expected = await run(folder, whole)
    assert whole.counts[kind]
    for number in sorted({1, (whole.counts[kind] + 1) // 2}):
        faults = Faults(kind, number)
        check(expected, await run(folder, faults), faults)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
async def test_each_call_of_each_kind_fails_and_one_request_ends(folder: Path, kind: str) -> None:
    whole = Faults()
    expected = await run(folder, whole)
    for number in range(1, whole.counts[kind] + 1):
        faults = Faults(kind, number)
        check(expected, await run(folder, faults), faults)
