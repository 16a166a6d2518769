"""Log-probabilities of a past answer are computed from a step log, with the bits that the server had."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from other_weights import MODEL

from llmstack_model_runner.testing import write_random_adapter

STORY = {"max_tokens": 30, "temperature": 0.9, "top_p": 0.9, "n": 2, "seed": 7, "logprobs": 3}
SUBJECTS = ("a cat", "two old friends", "the sea")
TARGETS = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]


def logprobs(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmstack_command", "logprobs", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def post_all(server: Any, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [answer for _, answer, _ in pool.map(lambda body: server.post("/v1/completions", body), bodies)]


def test_an_answer_has_its_log_probabilities_afterwards(serve: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "steps.log"
    with serve("--record-steps", str(log), "--max-num-batched-tokens", "16") as server:
        bodies = [STORY | {"prompt": f"Write a story about {subject}. It"} for subject in SUBJECTS]
        answers = post_all(server, bodies)
    for answer in answers:
        done = logprobs(answer["id"], "--log", log, "--model", "llmstack-demo", "--top", 3)
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(found) == len(answer["choices"]) == STORY["n"]
        for choice, part in zip(answer["choices"], found, strict=True):
            served = choice["logprobs"]
            assert [one["logprob"] for one in part["tokens"]] == served["token_logprobs"]
            tops = [sorted(one["top"].values(), reverse=True)[:3] for one in part["tokens"]]
            assert tops == [sorted(one.values(), reverse=True)[:3] for one in served["top_logprobs"]]


def test_what_is_in_the_way_is_named(serve: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "steps.log"
    adapter, other = (
        write_random_adapter(tmp_path / f"a{seed}", MODEL, TARGETS, seed, rank=4, spread=0.3) for seed in (1, 2)
    )
    options = ["--enable-lora", "--lora-modules", f"a={adapter}", "--max-lora-rank", "32"]
    with serve("--record-steps", str(log), *options) as server:
        plain, adapted = post_all(server, [STORY | {"prompt": "It", "model": name} for name in ("llmstack-demo", "a")])

    def error(*arguments: object) -> str:
        done = logprobs(*arguments, "--log", log)
        assert (done.returncode, done.stdout) == (1, "")
        last = done.stderr.splitlines()[-1]  # behind what loading the model says
        assert last.startswith("llmstack logprobs: error: ")
        return last

    demo = ("--model", "llmstack-demo")
    assert "has no request 'cmpl-0'" in error("cmpl-0", *demo)
    assert "the adapter 'a' was used: give its folder by --adapter" in error(adapted["id"], *demo)
    assert "the adapter's digest is " in error(adapted["id"], *demo, "--adapter", other)
    assert "no constraint restricted its tokens, so it has no masks" in error(plain["id"], *demo, "--masks")
    assert "no adapter was used" in error(plain["id"], *demo, "--adapter", adapter)
    assert "the computation differs: " in error(plain["id"], *demo, "--dtype", "float32")
    done = logprobs(adapted["id"], "--log", log, *demo, "--adapter", adapter)
    assert done.returncode == 0, done.stderr
    parts = [json.loads(line)["tokens"] for line in done.stdout.splitlines()]
    served = [choice["logprobs"]["token_logprobs"] for choice in adapted["choices"]]
    assert [[one["logprob"] for one in part] for part in parts] == served
