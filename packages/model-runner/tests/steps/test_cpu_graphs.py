"""Captured decode steps equal the model bit for bit, with any other steps between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.device_runners import needs_native_kernels
from torch.overrides import TorchFunctionMode

from llmstack_kernels.native.capture import CapturedCalls
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver, write_gpt2_checkpoint
from llmstack_types import ModelRunnerConfig, SamplingParams

pytestmark = needs_native_kernels
NUM_BLOCKS = 150


def make_driver(folder: Path, **options: object) -> tuple[ModelRunner, StepDriver]:
    config = ModelRunnerConfig(str(folder), max_model_len=64, block_size=4, max_num_seqs=140, **options)
    runner = ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner, StepDriver(runner, NUM_BLOCKS)


def play(driver: StepDriver) -> dict[str, list[int]]:
    """Batches of changing size, a prefill beside decodes, preemption; greedy and drawn rows with log-probabilities."""
    for index in range(4):
        params = SamplingParams(temperature=index % 2, seed=index, logprobs=3)
        driver.add(f"r{index}", [index, 2, 3, 5, 8, 13, 21][: 3 + index], params)
    driver.run(3)
    driver.step({"r1": 1})
    driver.step({"r3": 1, "r0": 1})
    driver.preempt("r2")
    driver.step({"r0": 1, "r2": 4})
    driver.run(4)
    driver.remove("r0")
    return driver.run(5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_captured_and_eager_steps_give_the_same_tokens(tmp_path: Path, dtype: str, quantization: str | None) -> None:
    write_gpt2_checkpoint(tmp_path, n_head=2)
    outputs = []
    for enforce_eager in (True, False):
        runner, driver = make_driver(tmp_path, dtype=dtype, quantization=quantization, enforce_eager=enforce_eager)
        outputs.append(play(driver))
        assert ("decode" in runner.backends()) is not enforce_eager
    assert outputs[0] == outputs[1]
    assert not driver.errors


class _Calls(TorchFunctionMode):
    """Takes down what is called of PyTorch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's own
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", repr(func)))
        return func(*args, **(kwargs or {}))


def test_a_replayed_step_of_greedy_rows_calls_nothing_of_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gpt2_checkpoint(tmp_path, n_head=2)
    _, driver = make_driver(tmp_path)
    for index in range(2):
        driver.add(f"r{index}", [index, 2, 3], SamplingParams(temperature=0.0))
    driver.run(3)
    modes: list[bool] = []
    replay = CapturedCalls.replay

    def watched(self: CapturedCalls) -> None:
        modes.append(torch.is_inference_mode_enabled())
        replay(self)

    monkeypatch.setattr(CapturedCalls, "replay", watched)
    with _Calls() as calls:
        driver.run(2)
    assert modes == [False, False]  # entering the mode takes as long as some operations
    assert calls.names == []


def test_logits_of_captured_steps_are_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gpt2_checkpoint(tmp_path, n_head=2)
    seen: list[list[torch.Tensor]] = []
    for enforce_eager in (True, False):
        runner, driver = make_driver(tmp_path, enforce_eager=enforce_eager)
        logits: list[torch.Tensor] = []
        sample = runner._sampler.sample
        monkeypatch.setattr(runner._sampler, "sample", lambda x, *m: (logits.append(x.clone()), sample(x, *m))[1])  # noqa: B023
        play(driver)
        seen.append(logits)
    assert len(seen[0]) == len(seen[1])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_steps_with_drafts_are_replayed_and_equal_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gpt2_checkpoint(tmp_path, n_head=2)
    seen: list[list[torch.Tensor]] = []
    outputs = []
    for enforce_eager in (True, False):
        runner, driver = make_driver(tmp_path, enforce_eager=enforce_eager)
        logits: list[torch.Tensor] = []
        sample = runner._sampler.sample
        monkeypatch.setattr(runner._sampler, "sample", lambda x, *m: (logits.append(x.clone()), sample(x, *m))[1])  # noqa: B023
        for index in range(3):
            driver.add(f"r{index}", [index, 2, 3, 5, 8][: 3 + index], SamplingParams(temperature=1.0, seed=index))
        driver.run(1)
        forward = runner._model.forward
        num_forwards: list[int] = []
        monkeypatch.setattr(runner._model, "forward", lambda *a: (num_forwards.append(1), forward(*a))[1])  # noqa: B023
        for _ in range(3):  # the first step of them captures
            drafts = {"r0": [7, 7, 7], "r2": [1]}
            driver.step({"r2": 1, "r0": 1, "r1": 1}, drafts)
            driver.step({"r1": 1, "r0": 1}, {"r1": [9, 9, 9, 9, 9]})
        driver.step({"r0": 1}, {"r0": [5] * 40})  # too long
        assert len(num_forwards) == (7 if enforce_eager else 2)
        outputs.append(driver.outputs)
        seen.append(logits)
    assert outputs[0] == outputs[1]
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_large_batches_are_not_captured(tmp_path: Path) -> None:
    write_gpt2_checkpoint(tmp_path, n_head=2)
    outputs = []
    for enforce_eager in (True, False):
        _, driver = make_driver(tmp_path, enforce_eager=enforce_eager)
        for index in range(135):
            driver.add(f"r{index}", [index % 90, 2], SamplingParams(temperature=0.0))
        outputs.append(driver.run(2))
    assert outputs[0] == outputs[1]


def test_a_model_that_uses_pytorch_operations_reports_why_it_is_not_captured(tmp_path: Path) -> None:
    write_gpt2_checkpoint(tmp_path)  # heads of 8, which the native attention does not take
    runner, driver = make_driver(tmp_path)
    assert "not captured: PyTorch" in runner.backends()["decode"]
    assert play(driver)
    assert not driver.errors
