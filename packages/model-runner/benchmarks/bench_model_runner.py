"""Steps of a GPT-2-sized model with made-up weights: decode at 1, 8 and 32 rows, and a prefill of 512 tokens."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.steps.timing import StepTiming
from llmstack_model_runner.testing import StepDriver, write_gpt2_config
from llmstack_types import ModelRunnerConfig, SamplingParams

NUM_BLOCKS = 1024
CONTEXT = 128
NUM_STEPS = 20
GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50_257}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A loaded and warm runner."""
    folder = write_gpt2_config(tmp_path_factory.mktemp("gpt2"), **GPT2)
    config = ModelRunnerConfig(str(folder), dtype=request.param, load_format="dummy", max_model_len=1024)
    runner = ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_decode_step(benchmark: Any, runner: ModelRunner, num_rows: int) -> None:
    """One token for each of the rows, at contexts from 128 on."""
    driver = StepDriver(runner, NUM_BLOCKS)
    names = [f"request-{index}" for index in range(num_rows)]
    for name in names:
        driver.add(name, list(range(CONTEXT)), SamplingParams(temperature=0.0))
        driver.step({name: CONTEXT})
    runner.timing = StepTiming()
    benchmark.pedantic(driver.step, args=(dict.fromkeys(names, 1),), rounds=NUM_STEPS)
    _report(benchmark, runner, num_rows)
    _end(driver, names)


def test_prefill(benchmark: Any, runner: ModelRunner) -> None:
    """A whole prompt of 512 tokens in one step."""
    driver = StepDriver(runner, NUM_BLOCKS)
    names = [f"prompt-{index}" for index in range(5)]
    remaining = iter(names)

    def prefill() -> None:
        name = next(remaining)
        driver.add(name, [i % 1000 for i in range(512)], SamplingParams(temperature=0.0))
        driver.step({name: 512})

    runner.timing = StepTiming()
    benchmark.pedantic(prefill, rounds=len(names))
    _report(benchmark, runner, 512)
    _end(driver, names)


def _report(benchmark: Any, runner: ModelRunner, num_tokens: int) -> None:
    benchmark.extra_info["tokens_per_s"] = num_tokens / benchmark.stats.stats.median
    for phase, seconds in runner.timing.phases_s.items():
        benchmark.extra_info[f"{phase}_ms"] = seconds / runner.timing.num_steps * 1e3


def _end(driver: StepDriver, names: list[str]) -> None:
    for name in names:
        driver.remove(name)
    driver.step({})
