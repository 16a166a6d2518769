"""Quantized checkpoints on ranks and stages, in another engine core, and a second time."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_runner_helpers.quantized_layers import CASES
from parallel_helpers.quantized import EXPERTS_IN_MXFP4, write_checkpoint
from parallel_helpers.schedules import NUM_BLOCKS, largest_difference, make_config, run_schedule

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver
from llmstack_types import ModelRunnerConfig, SamplingParams

QUICK = ("awq",)
NUM_TOKENS = 10


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "case",
    [
        case if case in QUICK else pytest.param(case, marks=pytest.mark.full)
        for case in (*CASES, EXPERTS_IN_MXFP4, "gguf")
    ],
)
def test_a_quantized_checkpoint_gives_the_tokens_of_one_rank_and_the_bits_of_one_stage(
    case: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, case)
    alone = run_schedule(make_config(folder), seed=1)
    assert sum(map(len, alone.outputs.values())) > 10
    again = run_schedule(make_config(folder), seed=1)  # as a replay computes it
    assert (again.outputs, again.logprobs) == (alone.outputs, alone.logprobs)
    shared = run_schedule(make_config(folder, tensor_parallel_size=2), seed=1)
    assert largest_difference(alone, shared) < 1e-3
    staged = run_schedule(make_config(folder, pipeline_parallel_size=2), seed=1)
    assert (staged.outputs, staged.logprobs) == (alone.outputs, alone.logprobs)
    check_another_engine_core(make_config(folder))


def check_another_engine_core(config: ModelRunnerConfig) -> None:
    """A request goes on in a runner that has read the checkpoint again, as after a crash."""
    params = SamplingParams(temperature=0.8, seed=5)
    prompt = [5, 17, 2, 44, 8, 1, 30]

    def start() -> StepDriver:
        runner = ModelRunner(config)
        runner.load_model()
        runner.initialize_kv_cache(NUM_BLOCKS)
        return StepDriver(runner, NUM_BLOCKS)

    first = start()
    first.add("a", prompt, params)
    whole = list(first.run(NUM_TOKENS)["a"])
    second = start()
    second.add("a", prompt, params)
    second.outputs["a"].extend(whole[:4])  # what a journal has
    second.preempt("a")
    assert second.run(NUM_TOKENS - 4)["a"] == whole
