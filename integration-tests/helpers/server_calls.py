"""Completions of a server that several test modules ask for, and streams that may end early."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai

PROMPTS = ["The", "A cat", "Once upon a time", "In the morning", "She said", "He was", "It is", "They"]


LONG = {"max_tokens": 400, "temperature": 0, "extra_body": {"ignore_eos": True}}
SLOW = {
    "max_tokens": 400, "temperature": 1, "seed": 1, "presence_penalty": 0.01, "logprobs": 5,
    "extra_body": {"ignore_eos": True, "typical_p": 0.99},
}  # fmt: skip
"""Three times as long, so that a stream still runs when a test on a busy machine looks."""


def complete(server: Any, prompt: str, max_tokens: int = 12) -> str:
    answer = server.client.completions.create(
        model="llmstack-demo", prompt=prompt, max_tokens=max_tokens, temperature=0
    )
    return str(answer.choices[0].text)


def complete_all(server: Any) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: complete(server, prompt), PROMPTS))


def open_stream(server: Any) -> Any:
    stream = server.client.completions.create(model="llmstack-demo", prompt="The", stream=True, **SLOW)
    next(iter(stream))
    return stream


def rest_of(stream: Any) -> str:
    """Why a stream has ended; `lost` where it was cut off, by an error event or with the connection."""
    try:
        return str(list(stream)[-1].choices[0].finish_reason)
    except (openai.APIError, httpx.TransportError):
        return "lost"


def post(server: Any, path: str) -> int:
    return httpx.post(server.url + path, timeout=60).status_code
