"""Malformed and odd requests against every route that takes JSON, without sockets.

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

from fuzz_bodies import FOREIGN_NAMES, ODD, RAW, ROUTES

from llmstack_llm.outputs.stats import IterationStats
from llmstack_server.app.application import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, ready_state
from llmstack_server.testing.asgi_client import Answer, call
from llmstack_types import SchedulerStats, StepPhases

NUM_LABELS = (1, 2)  # a model that scores pairs, and one that classifies: no model does both
GAP_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
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
            changed[draw.choice(FOREIGN_NAMES)] = draw.choice(ODD)
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
    is_whole = bool(error) if isinstance(error, str) else error["message"] and error["type"]  # Ollama's is a text
    if not is_whole:
        raise FuzzError(f"an error without a message or a type: {answer.body[:300]!r}")


def code_of(answer: Answer) -> str:
    """The code of an error; Ollama's have none."""
    error = answer.json()["error"]
    return "" if isinstance(error, str) else f" {error.get('code')}"


def make_state(num_labels: int) -> tuple[ServerState, FakeEngineClient]:
    """A server without an engine, on which every route can succeed that its number of labels allows."""
    engine = FakeEngineClient(num_labels=num_labels, token_names=GAP_TOKENS)
    engine.script, engine.released = "Hello, you", (1, 64)
    state = ready_state(engine, HTTPConfig(uvicorn_log_level="critical"))
    for number in range(40):  # steps from which first tokens can be predicted
        tokens, seconds = 1 + 100 * (number % 3), 0.001 + 0.0005 * (number % 3)
        stats = SchedulerStats(number + 1, num_running=1, num_scheduled_rows=1, num_scheduled_tokens=tokens)
        phases = StepPhases(0.0, seconds, 0.0)
        state.queue.record(stats, IterationStats(timestamp_s=time.monotonic(), phases=phases))
    return state, engine


async def fuzz(count: int, seed: int) -> Counter[str]:
    """Sends `count` requests; the counts of answers by status and code.

    Raises:
        FuzzError: An answer broke the contract; the message has what was sent.
    """
    draw, counts, paths = random.Random(seed), Counter[str](), list(ROUTES)
    servers = [(state, engine, build_app(state)) for state, engine in map(make_state, NUM_LABELS)]
    for number in range(count):
        path, (_, engine, app) = draw.choice(paths), draw.choice(servers)
        body = draw_body(draw, path)
        try:
            answer = await asyncio.wait_for(call(app, "POST", path, body), 60)
            check(answer)
        except Exception as error:
            raise FuzzError(f"request {number} of seed {seed}, {path} {body[:2000]!r}: {error!r}") from error
        counts["200" if answer.status == 200 else f"{answer.status}{code_of(answer)}"] += 1
        engine.admitted.clear()
        engine.rendered.clear()
        engine.aborted_request_ids.clear()
    for state, engine, _ in servers:
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
