"""Engine cores that are killed at random moments: each stream of two API processes is complete and the same."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import llmstack_demo_model
from llmstack_engine_client.processes.restarts import RESTART_WINDOW_S
from llmstack_model_runner.testing import write_random_adapter

NUM_READERS = 12
# Faster kills would leave no time for a start, of about a second, and then for the requests.
PAUSE_S = (0.5, 3.0)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)
BASE = "llmstack-demo"
SCHEMA = {
    "type": "object", "required": ["name", "days", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 60}, "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 6, "maxItems": 8},
    },
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
PLAIN = {"prompt": "Once upon a time", "max_tokens": 150, "ignore_eos": True}
TALK = {"messages": [{"role": "user", "content": "Tell me of a cat."}], "max_tokens": 300}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", {**PLAIN, "temperature": 0}),
    "seeded": ("completions", {**PLAIN, "temperature": 1, "seed": 7, "top_p": 0.9}),
    "penalised": ("completions", {**PLAIN, "temperature": 0.8, "seed": 3, "frequency_penalty": 0.5}),
    "several": ("completions", {**PLAIN, "temperature": 1, "seed": 5, "n": 3}),
    "logprobs": ("completions", {**PLAIN, "temperature": 0.7, "seed": 2, "logprobs": 2}),
    "adapter": ("completions", {**PLAIN, "model": "style", "temperature": 0}),
    "seeded adapter": ("completions", {**PLAIN, "model": "other-style", "temperature": 1, "seed": 9}),
    "drafts": ("completions", {**PLAIN, "prompt": "The cat sat. The cat sat. The cat", "temperature": 0}),
    "regex": ("completions", {**PLAIN, "temperature": 0, "structured_outputs": {"regex": "[a-z ]{120,140}"}}),
    "chat": ("chat/completions", {**TALK, "temperature": 1, "seed": 4, "n": 2}),
    "schema": ("chat/completions", {
        **TALK, "temperature": 1, "seed": 6,
        "response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": SCHEMA}},
    }),
    "tool": ("chat/completions", {
        **TALK, "temperature": 1, "seed": 8, "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "note"}},
    }),
}  # fmt: skip


def events_of(server: Any, name: str) -> Iterator[dict[str, Any]]:
    path, body = REQUESTS[name]
    url, asked = f"{server.url}/v1/{path}", {"model": BASE, **body, "stream": True}
    with httpx.stream("POST", url, json=asked, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    yield from map(json.loads, lines[:-1])


def read(server: Any, name: str) -> list[list[Any]]:
    """What each choice of a stream says: text, arguments of its call, log-probabilities, and why it ended."""
    choices: dict[int, list[Any]] = {}
    for event in events_of(server, name):
        assert "error" not in event, event
        for choice in event["choices"]:
            said = choices.setdefault(choice["index"], ["", "", [], None])
            delta = choice.get("delta", {})
            said[0] += choice.get("text") or delta.get("content") or ""
            said[1] += "".join(call["function"].get("arguments", "") for call in delta.get("tool_calls") or ())
            said[2] += (choice.get("logprobs") or {}).get("token_logprobs") or []
            said[3] = said[3] or choice["finish_reason"]
    return [said for _, said in sorted(choices.items())]


class Kills:
    """Kills engine cores at random, one after the other, while readers compare each stream with the expected one."""

    def __init__(self, server: Any, number: int) -> None:
        self.server, self.number = server, number
        self.expected = {name: read(server, name) for name in REQUESTS}
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._names = itertools.cycle(REQUESTS)
        self._is_over = threading.Event()

    def run(self) -> None:
        with ThreadPoolExecutor(NUM_READERS) as pool:
            readers = [pool.submit(self._read_on) for _ in range(NUM_READERS)]
            try:
                self._kill_all()
            finally:
                self._is_over.set()
            for reader in readers:
                reader.result()

    def _read_on(self) -> None:
        while not self._is_over.is_set():
            name = next(self._names)
            try:
                said = read(self.server, name)
            except (AssertionError, httpx.HTTPError) as error:
                self.problems.append(f"{name}: {error!r}")
                continue
            self.counts[name] += 1
            if said != self.expected[name]:
                self.problems.append(f"{name}: {said} in place of {self.expected[name]}")

    def _kill_all(self) -> None:
        rng = random.Random(self.number)
        for _ in range(self.number):
            time.sleep(rng.uniform(*PAUSE_S))
            pids = self.server.wait_for(self.server.engine_pids, "engine core")
            with suppress(ProcessLookupError):
                os.kill(rng.choice(pids), rng.choice(SIGNALS))


def test_requests_have_what_they_are_to_test(mixed_server: Any) -> None:
    expected = {name: read(mixed_server, name) for name in REQUESTS}
    assert [len(expected[name]) for name in ("several", "chat", "greedy")] == [3, 2, 1]
    assert len(expected["logprobs"][0][2]) == 150
    assert len(json.loads(expected["schema"][0][0])["tags"]) >= 6
    assert len(json.loads(expected["tool"][0][1])["tags"]) >= 6
    assert len({said[0][0] for name, said in expected.items() if "adapter" in name or name == "greedy"}) == 3
    assert mixed_server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


@pytest.fixture(scope="module")
def mixed_server(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two API processes over two engine cores, with drafts and two adapters."""
    folder, model = tmp_path_factory.mktemp("adapters"), Path(llmstack_demo_model.__file__).parent / "model"
    adapters = [
        f"{name}={write_random_adapter(folder / name, model, ['attn.c_attn', 'mlp.c_fc'], seed, spread=0.15)}"
        for seed, name in enumerate(("style", "other-style"), 1)
    ]
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with serve(
        "--api-server-count", "2", "-dp", "2", "--max-engine-restarts", "100",
        "--enable-lora", "--max-loras", "2", "--lora-modules", *adapters, "--speculative-config", json.dumps(drafts),
    ) as server:  # fmt: skip
        yield server


@pytest.mark.parametrize(
    "num_kills",
    [6, pytest.param(200, marks=(pytest.mark.full, pytest.mark.timeout(1800)))],
)
def test_every_stream_is_complete_and_the_same_however_often_engine_cores_are_killed(
    mixed_server: Any, num_kills: int
) -> None:
    kills = Kills(mixed_server, num_kills)
    kills.run()
    assert kills.problems == []
    assert set(kills.counts) == set(REQUESTS)
    assert "quarantine" not in mixed_server.log
    assert "Traceback" not in mixed_server.log


DEADLY = 666


@pytest.mark.full
@pytest.mark.timeout(300)
def test_beside_a_request_that_crashes_engine_cores_no_other_is_cut(serve: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / f"echo?deadly_token_id={DEADLY}&step_delay_s=0.03"
    folder.symlink_to(llmstack_demo_model.model_path())

    def read_echo(server: Any, *prompt: int) -> str:
        """The text, after which an error or the end comes."""
        body = {"model": BASE, "prompt": list(prompt), "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=180) as answer:
            answer.read()
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))
        return text + next((chunk["error"]["code"] for chunk in chunks if "error" in chunk), "[END]")

    with serve(
        str(folder), "--runner", "echo", "--served-model-name", BASE, "--api-server-count", "2",
        "--max-engine-restarts", "20",
    ) as server, ThreadPoolExecutor(9) as pool:  # fmt: skip
        expected = read_echo(server, 5, 6, 7)
        for number in range(2):
            time.sleep(RESTART_WINDOW_S * number)  # a minute has places for the restarts of one search
            innocent = [pool.submit(read_echo, server, 5, 6, 7) for _ in range(8)]
            bad = pool.submit(read_echo, server, 5, 6, 7, 8, 9, 10, DEADLY)
            assert bad.result().endswith("request_quarantined")
            assert [reading.result() for reading in innocent] == [expected] * 8
