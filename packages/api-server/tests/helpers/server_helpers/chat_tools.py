"""A chat over a scripted engine, streamed and whole, with tools."""

from __future__ import annotations

from typing import Any

from llmstack_server.app import build_app
from llmstack_server.chat.parsers import choose_parsers
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state

CHAT = "/v1/chat/completions"


USER = {"role": "user", "content": "Hi"}


HERMES, THINKING = "<tool_call>", "<tool_call></think>"


CALL = '<tool_call>{"name": "now", "arguments": {"a": "é"}}</tool_call>'


def tool(name: str = "now", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def folded(answer: Answer) -> dict[str, Any]:
    """The message that the chunks of a stream add up to, as the official clients put it together."""
    *chunks, done = answer.events()
    assert done == "[DONE]"
    message: dict[str, Any] = {"calls": []}
    for choice in (chunk["choices"][0] for chunk in chunks if chunk["choices"]):
        for piece in choice["delta"].get("tool_calls", ()):
            if piece["index"] == len(message["calls"]):
                message["calls"].append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
            message["calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
        assert choice["delta"].get("reasoning") == choice["delta"].get("reasoning_content")
        for key in ("content", "reasoning_content"):
            message[key] = message.get(key, "") + (choice["delta"].get(key) or "")
        message["finish_reason"] = choice["finish_reason"]
    return message


class Server:
    """One application over one scripted engine."""

    def __init__(self, template: str | None = HERMES, *, response_template: object = None, **options: Any) -> None:
        self.engine = FakeEngineClient()
        state = ready_state(self.engine, chat=ChatOptions(**options), chat_template=template)
        if response_template is not None:
            state.chat_parsers = choose_parsers(state.config.chat, template, response_template)
        self.app = build_app(state)

    async def ask(self, script: str | None = None, **fields: Any) -> Answer:
        self.engine.script = script
        return await call(self.app, "POST", CHAT, {"messages": [USER], **fields})

    async def both(self, script: str, **fields: Any) -> dict[str, Any]:
        """The message as a stream and as a whole answer, which must agree."""
        whole = await self.ask(script, **fields)
        assert whole.status == 200, whole.body
        choice = whole.json()["choices"][0]
        streamed = folded(await self.ask(script, stream=True, **fields))
        message = choice["message"]
        calls = [{**entry["function"], "id": ""} for entry in message.get("tool_calls", ())]
        assert message.get("reasoning") == message.get("reasoning_content")
        assert streamed == {
            "content": message["content"] or "",
            "reasoning_content": message.get("reasoning_content", ""),
            "finish_reason": choice["finish_reason"],
            "calls": [{**entry, "id": streamed["calls"][index]["id"]} for index, entry in enumerate(calls)],
        }
        return {**message, "finish_reason": choice["finish_reason"]}
