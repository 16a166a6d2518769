"""Tensor parallel, stages and replicas at once give the tokens of one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from quantized_demo import write_quantized_demo
from server_calls import PROMPTS

from llmstack_demo_model import model_path
from llmstack_model_runner.testing import write_random_adapter

TARGETS = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
NUM_TOKENS = 16


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    return write_quantized_demo(tmp_path / "quantized")


def answers(server: Any, models: Sequence[str]) -> list[tuple[str, list[float]]]:
    """Text and log-probabilities of each prompt from each model, half of them sampled; all at the same time."""

    def ask(number: int, model: str, prompt: str) -> tuple[str, list[float]]:
        temperature = float(number % 2)
        options = {"temperature": temperature, "seed": number, "logprobs": 1, "max_tokens": NUM_TOKENS}
        body = {"model": model, "prompt": prompt, "ignore_eos": True, **options}
        status, answer, _ = server.post("/v1/completions", body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        return choice["text"], choice["logprobs"]["token_logprobs"]

    asked = [(number, model, prompt) for model in models for number, prompt in enumerate(PROMPTS)]
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda one: ask(*one), asked))


@pytest.mark.full
@pytest.mark.parametrize("is_quantized", [False, True], ids=["adapters", "adapters over a quantized checkpoint"])
def test_eight_processes_with_adapters_give_the_tokens_of_one(
    serve: Callable[..., Any], tmp_path: Path, quantized: Path, is_quantized: bool
) -> None:
    folder = quantized if is_quantized else model_path()
    styles = {f"style-{seed}": write_random_adapter(tmp_path / f"{seed}", model_path(), TARGETS, seed, spread=0.15)
              for seed in (1, 2)}  # fmt: skip
    modules = [f"{name}={path}" for name, path in styles.items()]
    line = [str(folder), "--served-model-name", "plain", "--dtype", "float32", "--enable-lora", "--max-loras", "2"]
    line += ["--lora-modules", *modules, "--max-model-len", "64", "--num-kv-blocks", "128"]
    with serve(*line) as server:
        expected = answers(server, ["plain", *styles])
    assert len({text for text, _ in expected}) > 2 * len(PROMPTS)
    with serve(*line, "-tp", "2", "-pp", "2", "-dp", "2") as server:
        found = answers(server, ["plain", *styles])
        assert [text for text, _ in found] == [text for text, _ in expected]
        for (_, logprobs), (_, others) in zip(found, expected, strict=True):
            assert logprobs == pytest.approx(others, abs=1e-4)
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        steps = re.findall(r'llmstack:engine_steps_total\{engine="(\d)".*\} (\S+)', metrics)
        assert [float(count) > 0 for _, count in sorted(steps)] == [True, True]
