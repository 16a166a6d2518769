"""Leak accounting over millions of engine steps, and over minutes of a real server.

    python benchmarks/soak.py steps --count 4300000
    python benchmarks/soak.py server --minutes 30

`make soak` runs both; `docs/reliability.md` has the last figures.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import llmstack_demo_model
from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core
from llmstack_model_runner.testing import write_random_adapter
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

ADAPTERS = ("style", "other-style")
LIMITS = {"max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 64}
NUM_BLOCKS = 96
STEPS_PER_ROUND = 20_000
# What the interpreter itself may keep after a round: caches of code, of methods, of small objects.
MAX_NEW_OBJECTS = 200
MAX_RISE_MIB = 2.0
WARM_UP_SHARE = 0.3
NUM_SAMPLES = 180
START_TIMEOUT_S = 120.0
# Memory of the KV cache is taken when a block is first written, and that of the step log when a step is: both have to
# be full before the first sample.
SERVER_OPTIONS = ("--num-kv-blocks", "256", "--step-log-bytes", "65536", "--tool-call-parser", "hermes")
MIB = 1 << 20


class LeakError(Exception):
    """Something was left behind."""


def build() -> EngineCore:
    config = EngineConfig(
        ModelRunnerConfig("echo", block_size=8, **LIMITS), runner="echo", scheduler=SchedulerConfig(**LIMITS),
        num_blocks=NUM_BLOCKS, num_host_blocks=48, step_log_bytes=64 << 10,
    )  # fmt: skip
    return build_engine_core(config)


def draw_request(draw: random.Random, number: int) -> EngineCoreRequest:
    """A request of random length, whose prompt often begins as another one does."""
    prompt = [draw.randrange(8)] * draw.randrange(1, 60) + [
        draw.randrange(50_000) for _ in range(draw.randrange(1, 30))
    ]
    params = SamplingParams(max_tokens=draw.randrange(1, 30), seed=number, temperature=draw.choice((0.0, 1.0)))
    return EngineCoreRequest(f"r{number}", prompt, params, tenant=draw.choice(("", "a", "b")))


def play(core: EngineCore, draw: random.Random, numbers: itertools.count[int], num_steps: int) -> Counter[str]:
    """Steps with random arrivals and aborts, then steps until the engine is idle."""
    totals: Counter[str] = Counter()
    running: list[str] = []
    while totals["steps"] < num_steps or core.has_unfinished_requests():
        if totals["steps"] < num_steps and len(running) < 40:
            for _ in range(draw.choice((0, 0, 1, 1, 2))):
                request = draw_request(draw, next(numbers))
                core.add_request(request)
                running.append(request.request_id)
                totals["requests"] += 1
        if running and draw.random() < 0.02:
            aborted = running.pop(draw.randrange(len(running)))
            core.abort_requests([aborted])
            totals["aborts"] += 1
        for output in core.step().outputs:
            totals["tokens"] += len(output.new_token_ids)
            if output.finish_reason is not None and output.request_id in running:
                running.remove(output.request_id)
        totals["steps"] += 1
    return totals


def count_objects() -> Counter[str]:
    """Live objects of this project by type."""
    gc.collect()
    names = (f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects())
    return Counter(name for name in names if name.startswith("llmstack"))


def soak_steps(count: int, seed: int) -> dict[str, Any]:
    """Runs `count` steps; the engine core is empty after every round of them.

    Raises:
        LeakError: Blocks, requests or objects were left.
    """
    core, draw, numbers = build(), random.Random(seed), itertools.count()
    num_blocks = core.stats().num_free_blocks
    totals: Counter[str] = Counter()
    before: Counter[str] | None = None  # after the first round, when the rings of logs and events are full
    before_mib = grown_mib = 0.0
    while totals["steps"] < count:
        totals += play(core, draw, numbers, min(STEPS_PER_ROUND, count - totals["steps"]))
        core.reset_prefix_cache()
        stats, after, mib = core.stats(), count_objects(), psutil.Process().memory_info().rss / MIB
        if before is None:
            before, before_mib = after, mib
        grown_mib = mib - before_mib
        left = {name: more for name, more in (after - before).items() if more > MAX_NEW_OBJECTS}
        if stats.num_free_blocks != num_blocks or stats.num_running or stats.num_waiting or left:
            raise LeakError(f"after {totals['steps']} steps of seed {seed}: {stats}, objects left: {left}")
    core.shutdown()
    return {**totals, "preemptions": core.stats().num_preemptions, "grown_mib": round(grown_mib, 1), "seed": seed}


def rise_mib(samples: list[tuple[float, float]]) -> float:
    """The growth in (seconds, MiB) after the warm-up, by the median slope of all pairs (Theil and Sen)."""
    kept = samples[int(len(samples) * WARM_UP_SHARE) :]
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in itertools.combinations(kept, 2) if t > s]
    return (kept[-1][0] - kept[0][0]) * statistics.median(slopes) if slopes else 0.0


def draw_schema(draw: random.Random) -> dict[str, Any]:
    """A small schema, mostly one that no request had before."""
    name = f"p{draw.randrange(10**6)}"
    properties = {name: {"type": "string", "maxLength": draw.randrange(4, 12)}, "n": {"type": "integer"}}
    return {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}


def draw_body(draw: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A path and a request: of a few kinds, each with what is random in it."""
    fields = {"max_tokens": draw.randrange(1, 60), "stream": draw.random() < 0.7, "seed": draw.randrange(1000)}
    prompt = f"Day {draw.randrange(400)}"
    kind = draw.choice(("plain", "adapter", "several", "regex", "chat", "tool", "schema"))
    if kind in ("plain", "adapter", "several", "regex"):
        special: dict[str, dict[str, Any]] = {
            "adapter": {"model": draw.choice(ADAPTERS)},
            "several": {"n": 2, "logprobs": 2},
            "regex": {"structured_outputs": {"regex": f"[a-z ]{{{draw.randrange(1, 20)},{draw.randrange(20, 40)}}}"}},
        }
        return "/v1/completions", {"model": model, "prompt": prompt, **fields, **special.get(kind, {})}
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], **fields}
    if kind == "tool":
        body["tools"] = [{"type": "function", "function": {"name": "note", "parameters": draw_schema(draw)}}]
        body["tool_choice"] = draw.choice(("auto", "required"))
    elif kind == "schema":
        format_ = {"name": "note", "schema": draw_schema(draw)}
        body["response_format"] = {"type": "json_schema", "json_schema": format_}
    return "/v1/chat/completions", body


def ask(address: str, model: str, stop: threading.Event, seed: int, counts: Counter[str]) -> None:
    """Requests one after the other: whole ones, streams, and streams that are left in the middle."""
    draw = random.Random(seed)
    while not stop.is_set():
        path, body = draw_body(draw, model)
        connection = http.client.HTTPConnection(address, timeout=120)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if body["stream"] and draw.random() < 0.2:
            answer.read(draw.randrange(1, 600))
            counts["left"] += 1
        else:
            answer.read()
            counts[str(answer.status)] += 1
        connection.close()


def write_adapters(folder: Path) -> list[str]:
    """Writes two adapters of the demo model; the options for them."""
    model = Path(llmstack_demo_model.model_path())
    modules = ["attn.c_attn", "mlp.c_fc"]
    paths = [write_random_adapter(folder / name, model, modules, seed) for seed, name in enumerate(ADAPTERS)]
    named = [f"{name}={path}" for name, path in zip(ADAPTERS, paths, strict=True)]
    return ["--enable-lora", "--max-loras", "2", "--lora-modules", *named]


@contextmanager
def serving(*options: str) -> Iterator[tuple[psutil.Process, str]]:
    """A server of the demo model, and its address."""
    command = [
        sys.executable,
        "-m",
        "llmstack_command",
        "serve",
        "llmstack-demo",
        "--port",
        "0",
        *SERVER_OPTIONS,
        *options,
    ]
    with tempfile.NamedTemporaryFile("r") as log, tempfile.TemporaryDirectory() as folder:
        command += write_adapters(Path(folder))
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=os.open(log.name, os.O_WRONLY))
        try:
            deadline_s, text = time.monotonic() + START_TIMEOUT_S, ""
            while "is ready on http://" not in text:
                if server.poll() is not None or time.monotonic() > deadline_s:
                    raise LeakError(f"the server has not started:\n{text}")
                time.sleep(0.1)
                text += log.read()
            yield psutil.Process(server.pid), text.split("is ready on http://")[1].split()[0]
        finally:
            server.terminate()
            server.wait(60)


def soak_server(minutes: float, num_clients: int, *, is_judged: bool = True) -> dict[str, Any]:
    """Requests for some minutes; the growth of every process of the server.

    Raises:
        LeakError: A process grew by more than `MAX_RISE_MIB` after the warm-up.
    """
    counts: Counter[str] = Counter()
    stop = threading.Event()
    with serving() as (server, address):
        clients = [
            threading.Thread(target=ask, args=(address, "llmstack-demo", stop, seed, counts))
            for seed in range(num_clients)
        ]
        family = [server, *server.children(recursive=True)]
        samples: dict[str, list[tuple[float, float]]] = {" ".join(p.cmdline()[1:4]): [] for p in family}
        try:
            for client in clients:
                client.start()
            start_s = time.monotonic()
            while (passed_s := time.monotonic() - start_s) < minutes * 60:
                for process, rows in zip(family, samples.values(), strict=True):
                    rows.append((passed_s, process.memory_info().rss / MIB))
                time.sleep(max(minutes * 60 / NUM_SAMPLES, 0.2))
        finally:
            stop.set()
            for client in clients:
                client.join()
    refused = counts.total() - counts["200"] - counts["left"]
    rises = {name: round(rise_mib(rows), 2) for name, rows in samples.items()}
    ends = {name: round(rows[-1][1], 1) for name, rows in samples.items()}
    result = {"minutes": minutes, "answers": dict(counts), "rise_mib": rises, "mib_at_end": ends}
    if refused:
        raise LeakError(f"{refused} answers are errors: {result}")
    if is_judged and max(rises.values()) > MAX_RISE_MIB:
        raise LeakError(f"a process grows: {result}")
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    steps = kinds.add_parser("steps", help="steps of an engine core over a model runner without a model")
    steps.add_argument("--count", type=int, default=4_300_000)
    steps.add_argument("--seed", type=int, default=random.randrange(2**32))
    server = kinds.add_parser("server", help="a server of the demo model under load")
    server.add_argument("--minutes", type=float, default=30.0)
    server.add_argument("--clients", type=int, default=4)
    options = parser.parse_args(arguments)
    try:
        if options.kind == "steps":
            result = soak_steps(options.count, options.seed)
        else:
            result = soak_server(options.minutes, options.clients)
    except LeakError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
