"""A bare HTTP front for engines that have none: streaming `POST /v1/completions` with a prompt of token ids."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from tokenizers import Tokenizer

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Engine(Protocol):
    """What stands behind the front; greedy."""

    def start(self) -> None:
        """Called once, on the event loop."""

    def add(self, token_ids: list[int], max_tokens: int, *, ignore_eos: bool) -> asyncio.Queue[list[int] | None]:
        """A request: lists of new token ids as they come, then None."""


class Front:
    """An ASGI application without a framework, so that little of the cores that compute goes into HTTP."""

    def __init__(self, name: str, tokenizer: Path, engine: Engine) -> None:
        self._name = name
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._engine = engine

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Every path but that of completions answers with the list of models, `/health` too."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["path"] == "/v1/completions":
            await self._complete(json.loads(await _body(receive)), send)
        else:
            models = {"object": "list", "data": [{"id": self._name, "object": "model"}]}
            await _start(send, b"application/json")
            await _send(send, _encode(models), is_last=True)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._engine.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _complete(self, request: dict[str, Any], send: Send) -> None:
        prompt = request["prompt"]
        token_ids = self._tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        max_tokens = request.get("max_tokens", 16)
        tokens = self._engine.add(token_ids, max_tokens, ignore_eos=bool(request.get("ignore_eos")))
        await _start(send, b"text/event-stream")
        num_tokens = 0
        while (new := await tokens.get()) is not None:
            num_tokens += len(new)
            await _send(send, self._event(self._tokenizer.decode(new), None))
        await _send(send, self._event("", "stop" if num_tokens < max_tokens else "length"))
        usage = {"prompt_tokens": len(token_ids), "completion_tokens": num_tokens}
        await _send(send, _event({"object": "text_completion", "choices": [], "usage": usage}))
        await _send(send, b"data: [DONE]\n\n", is_last=True)

    def _event(self, text: str, finish_reason: str | None) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return _event({"object": "text_completion", "model": self._name, "choices": [choice]})


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every engine has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("folder", type=Path, help="the checkpoint, with tokenizer.json")
    made.add_argument("--name", help="of the model (default: that of the folder)")
    made.add_argument("--port", type=int, default=8000)
    made.add_argument("--threads", type=int, default=2)
    return made


def serve(options: argparse.Namespace, engine: Engine) -> None:
    """Listens on the loopback interface until a signal."""
    front = Front(options.name or options.folder.name, options.folder / "tokenizer.json", engine)
    uvicorn.run(front, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _start(send: Send, content_type: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]})


async def _send(send: Send, data: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not is_last})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


def _encode(data: dict[str, Any]) -> bytes:
    return json.dumps(data).encode()
