"""The functions that a plain chat passes in the API process, over `AsyncLLM` with an echoing engine core."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from llmstack_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_server.app import build_app
from llmstack_server.testing import call, ready_state

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}
# Modules of what a plain chat does not use.
FOREIGN = (
    "structured", "constraints", "choice.py", "beam", "trace", "telemetry", "request_log", "observers", "tools.py",
    "parsers", "reading", "reasoning", "bad_words", "stop_strings", "deadlines", "pooling",
)  # fmt: skip


@pytest.fixture
async def llm(tmp_path: Path) -> AsyncIterator[AsyncLLM]:
    folder = write_model_folder(tmp_path / "model")
    made = AsyncLLM(load_model_config(str(folder)), FakeEngineCoreClient(), load_tokenizer(folder))
    await made.wait_until_ready()
    yield made
    await made.shutdown()


def path_of(code: CodeType) -> str:
    return code.co_filename.replace("\\", "/")


async def calls_of_a_chat(llm: AsyncLLM) -> list[tuple[CodeType, CodeType | None]]:
    """Functions of `src` folders with their callers, of the second chat: the first one fills caches."""
    app, calls = build_app(ready_state(llm)), []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "/src/llmstack_" in path_of(frame.f_code):
            calls.append((frame.f_code, frame.f_back.f_code if frame.f_back else None))

    assert (await call(app, "POST", CHAT, BODY)).status == 200
    sys.setprofile(note)
    try:
        answer = await call(app, "POST", CHAT, BODY)
    finally:
        sys.setprofile(None)
    assert answer.events()[-1] == "[DONE]"
    return calls


async def test_a_plain_chat_passes_no_stage_that_it_does_not_use(llm: AsyncLLM):
    functions = {(path_of(code), code.co_name) for code, _ in await calls_of_a_chat(llm)}
    passed = [(path, name) for path, name in functions if any(part in path.rpartition("/src/")[2] for part in FOREIGN)]
    assert not passed


async def test_the_server_enters_the_engine_by_render_and_submit(llm: AsyncLLM):
    entered = [
        code.co_name
        for code, caller in await calls_of_a_chat(llm)
        if caller is not None
        and path_of(code).endswith(("llmstack_llm/async_llm.py", "llmstack_llm/engine_front_end.py"))
        and "/llmstack_server/chat/" in path_of(caller)
    ]
    assert entered[:2] == ["render", "submit"]
    assert set(entered) == {"render", "submit"}


async def test_a_bad_field_is_refused_before_anything_is_rendered_or_tokenized(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("tokenized")

    monkeypatch.setattr(llm.tokenizer, "encode", refuse)
    monkeypatch.setattr(llm.chat_template, "render", refuse)
    app = build_app(ready_state(llm))
    for path, body in ((CHAT, BODY), ("/v1/completions", {"prompt": "Hello"})):
        for field, value in {"temperature": 3, "n": 0, "stop": [""], "truncate_prompt_tokens": 0}.items():
            answer = await call(app, "POST", path, {**body, field: value})
            assert (answer.status, answer.json()["error"]["param"]) == (400, field)
