"""Malformed and odd requests against every route of the server, without sockets.

    python benchmarks/fuzz_requests.py --count 1000000

Each request begins as a valid one; fields are removed, doubled, exchanged and given values of any type, and some
bodies are cut or are no JSON. Every answer must be a success, or an error of the contract: never a 500, never a
traceback, never more than 2 KiB. The seed of a failure is printed; `make fuzz` runs this.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from llmstack_server.app.application import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import FakeEngineClient, ready_state
from llmstack_server.testing.asgi_client import Answer, call

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "fake",
        "prompt": "Hello",
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "n": 1,
        "seed": 1,
        "stop": ["x"],
        "logprobs": 1,
        "logit_bias": {"5": 1.0},
        "presence_penalty": 0.1,
        "echo": False,
        "stream": False,
        "user": "me",
        "suffix": None,
        "best_of": 1,
        "priority": 0,
        "cache_salt": "s",
        "structured_outputs": None,
        "stop_token_ids": [1],
        "prompt_logprobs": None,
        "ignore_eos": True,
    },
    "/v1/chat/completions": {
        "model": "fake",
        "messages": MESSAGES,
        "max_completion_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "text"},
        "tools": [TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "chat_template_kwargs": {},
        "add_generation_prompt": True,
        "continue_final_message": False,
        "reasoning_effort": "low",
        "metadata": {"a": "b"},
    },
    "/v1/responses": {
        "model": "fake",
        "input": "Hello",
        "max_output_tokens": 16,
        "store": False,
        "stream": False,
        "instructions": "Be kind",
        "temperature": 1,
        "text": {"format": {"type": "text"}},
        "metadata": {},
        "truncation": "disabled",
        "include": [],
    },
    "/v1/messages": {
        "model": "fake",
        "messages": MESSAGES,
        "max_tokens": 4,
        "system": "Be kind",
        "stop_sequences": ["x"],
        "stream": False,
        "temperature": 0.5,
        "top_k": 3,
        "metadata": {"user_id": "u"},
    },
    "/v1/messages/count_tokens": {"model": "fake", "messages": MESSAGES},
    "/v1/embeddings": {"model": "fake", "input": ["Hello", "you"], "encoding_format": "float", "dimensions": 2},
    "/v1/score": {"model": "fake", "text_1": "a", "text_2": ["b", "c"]},
    "/v1/rerank": {"model": "fake", "query": "a", "documents": ["b", "c"], "top_n": 1},
    "/classify": {"model": "fake", "input": "Hello"},
    "/pooling": {"model": "fake", "input": "Hello"},
    "/tokenize": {"model": "fake", "prompt": "Hello", "add_special_tokens": True},
    "/detokenize": {"model": "fake", "tokens": [72, 101]},
    "/invocations": {"model": "fake", "prompt": "Hello", "max_tokens": 3},
}
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**70),
    1e308,
    -0.0,
    0.1,
    "",
    " ",
    "x" * 300,
    "\u0000",
    "\ud800",
    "\u202e",
    "😀" * 40,
    "<|endoftext|>",
    "NaN",
    [],
    [[]],
    [None],
    [[[[]]]],
    {},
    {"": {}},
    {"type": "object"},
    [1, "a"],
    [{}],
    {"a": [{"b": None}]},
    "a" * 9000,
    [0] * 300,
    {str(k): k for k in range(200)},
    "../../etc/passwd",
    "${jndi:x}",
]
RAW = [
    b"",
    b"null",
    b"[]",
    b"{",
    b'{"a":',
    b"\xff\xfe",
    b'{"model": NaN}',
    b'{"a":1e999}',
    b'{"model":"fake","model":"x"}',
    b"{}" * 3,
    b'{"a":' + b"9" * 5000 + b"} x",
    b"[" * 5000,
    b'"' + b"\\u0000" * 20 + b'"',
    b'{"prompt":"\\ud800"}',
]
FOREIGN_NAMES = ["", "x", "model", "guided_json", "prompt_embeds", "n", "__class__"]
ALLOWED = {200, 400, 401, 403, 404, 405, 406, 408, 413, 415, 422, 429, 501, 503}
MAX_ERROR_BYTES = 2048


class FuzzError(Exception):
    """An answer that no client should get."""


def mutate(draw: random.Random, value: Any, depth: int = 0) -> Any:
    """The value with a few places exchanged."""
    if depth and draw.random() < 0.2:
        return draw.choice(ODD)
    if isinstance(value, dict):
        names = [name for name in value if draw.random() < 0.9]
        changed = {name: mutate(draw, value[name], depth + 1) if draw.random() < 0.3 else value[name] for name in names}
        if draw.random() < 0.15:
            changed[draw.choice(["", "x", "model", "guided_json", "prompt_embeds", "n", "__class__"])] = draw.choice(
                ODD
            )
        return changed
    if isinstance(value, list):
        return [mutate(draw, item, depth + 1) for item in value for _ in range(draw.choice((0, 1, 1, 1, 2)))]
    return draw.choice(ODD) if draw.random() < 0.5 else value


def draw_body(draw: random.Random, path: str) -> bytes:
    """A body for the route: mostly JSON that is nearly right."""
    if draw.random() < 0.03:
        return draw.choice(RAW)
    body = ROUTES[path if draw.random() < 0.95 else draw.choice(list(ROUTES))]
    text = json.dumps(mutate(draw, body)).encode()
    if draw.random() < 0.03:
        start = draw.randrange(len(text))
        return text[:start] + bytes([draw.randrange(256)]) + text[start + draw.randrange(3) :]
    return text[: draw.randrange(len(text))] if draw.random() < 0.02 else text


def check(answer: Answer) -> None:
    """Raises FuzzError unless the answer is one of the contract."""
    if answer.status not in ALLOWED:
        raise FuzzError(f"status {answer.status}: {answer.body[:300]!r}")
    if b"Traceback" in answer.body or b"site-packages" in answer.body:
        raise FuzzError(f"the answer shows the server's insides: {answer.body[:300]!r}")
    if answer.status == 200:
        return
    if len(answer.body) > MAX_ERROR_BYTES:
        raise FuzzError(f"an error of {len(answer.body)} bytes")
    error = answer.json()["error"]
    if not error["message"] or not error["type"]:
        raise FuzzError(f"an error without a message or a type: {answer.body[:300]!r}")


async def fuzz(count: int, seed: int) -> Counter[str]:
    """Sends `count` requests; the counts of answers by status and code.

    Raises:
        FuzzError: An answer broke the contract; the message has what was sent.
    """
    draw, counts = random.Random(seed), Counter[str]()
    engine = FakeEngineClient(num_labels=2)
    engine.script = "Hello, you"
    state = ready_state(engine, HTTPConfig(uvicorn_log_level="critical"))
    app, paths = build_app(state), list(ROUTES)
    for number in range(count):
        path = draw.choice(paths)
        body = draw_body(draw, path)
        try:
            answer = await asyncio.wait_for(call(app, "POST", path, body), 60)
            check(answer)
        except Exception as error:
            raise FuzzError(f"request {number} of seed {seed}, {path} {body[:2000]!r}: {error!r}") from error
        code = "" if answer.status == 200 else f" {answer.json()['error'].get('code')}"
        counts[f"{answer.status}{code}"] += 1
        engine.admitted.clear()
        engine.rendered.clear()
        engine.aborted_request_ids.clear()
    if state.in_flight.count or engine.num_running:
        raise FuzzError(f"{state.in_flight.count} requests are left, {engine.num_running} of them run")
    return counts


def main(arguments: list[str] | None = None) -> int:
    return run(__doc__, fuzz, "answers", 1_000_000, arguments)


def run(
    description: str | None,
    fuzz: Callable[[int, int], Coroutine[Any, Any, Counter[str]]],
    counted: str,
    default_count: int,
    arguments: list[str] | None,
) -> int:
    """A fuzzer as a command: prints what it has counted, or the seed of the failure."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=default_count)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    start_s = time.monotonic()
    try:
        counts = asyncio.run(fuzz(options.count, options.seed))
    except FuzzError as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 1
    seconds = round(time.monotonic() - start_s)
    print(json.dumps({"seed": options.seed, "seconds": seconds, counted: dict(counts.most_common())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
