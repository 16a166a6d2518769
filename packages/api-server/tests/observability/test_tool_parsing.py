"""How often a parser of tool calls has read something, and found a call, is a metric under vLLM's name."""

from __future__ import annotations

from typing import Any

from llmstack_server.app import build_app
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.testing import FakeEngineClient, call, ready_state

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "now"}}]
USER = [{"role": "user", "content": "Hi"}]


async def test_choices_and_chunks_that_a_tool_parser_reads_are_counted() -> None:
    engine = FakeEngineClient()
    app = build_app(ready_state(engine, chat=ChatOptions(tool_call_parser="hermes")))

    async def count(mode: str, outcome: str, kind: str = "chat_completions") -> float:
        text = (await call(app, "GET", "/metrics")).body.decode()
        labels = f'mode="{mode}",model_name="fake",outcome="{outcome}",request_type="{kind}"'
        name = f"vllm:tool_call_parser_invocations_total{{{labels}}} "
        [line] = [line for line in text.splitlines() if line.startswith(name)]
        return float(line.removeprefix(name))

    async def ask(path: str = "/v1/chat/completions", *, script: str = CALL, **fields: Any) -> None:
        engine.script = script
        assert (await call(app, "POST", path, fields)).status == 200

    assert await count("non_streaming", "tool_call") == 0
    await ask(messages=USER, tools=TOOLS)
    await ask(messages=USER, tools=TOOLS, script="Hi")
    await ask(messages=USER)  # without tools nothing is parsed
    assert (await count("non_streaming", "tool_call"), await count("non_streaming", "no_tool_call")) == (1, 1)
    await ask(messages=USER, tools=TOOLS, stream=True)
    assert await count("streaming", "tool_call") >= 1
    assert await count("streaming", "tool_call") + await count("streaming", "no_tool_call") == len(CALL)
    await ask("/v1/responses", input="Hi", tools=[{"type": "function", "name": "now"}])
    assert await count("non_streaming", "tool_call", "responses") == 1
