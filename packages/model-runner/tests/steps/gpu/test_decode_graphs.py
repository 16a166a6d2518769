"""Decode steps are captured at few sizes if possible, and otherwise run without graphs and report it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.ahead_driver import AheadDriver
from model_runner_helpers.cpu_stand_in import CpuStandIn
from model_runner_helpers.device_runners import needs_native_kernels

from llmstack_kernels.graph_safety import no_host_synchronisation
from llmstack_model_runner.device.runtime import Graph, GraphCaptureError
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.steps.gpu.decode_graphs import decode_sizes
from llmstack_model_runner.testing import write_gpt2_checkpoint
from llmstack_types import ModelRunnerConfig, SamplingParams

NUM_BLOCKS = 32
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=1.0, seed=3)

needs_native_kernels = needs_native_kernels


def test_sizes_are_dense_where_a_row_counts_and_end_at_the_most_there_can_be() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(3) == [1, 2, 3]
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert decode_sizes(100)[-6:] == [48, 56, 64, 80, 96, 100]
    assert decode_sizes(300)[-4:] == [192, 224, 256, 300]
    sizes = decode_sizes(10_000)
    assert sizes[-1] == 512
    assert len(sizes) == 23
    for num_rows in range(33, 513):
        assert min(size for size in sizes if size >= num_rows) <= 1.25 * num_rows


def test_given_sizes_are_used_up_to_the_number_of_rows() -> None:
    assert decode_sizes(16, (32, 4, 8, 4)) == [4, 8]
    assert decode_sizes(2, (4,)) == []


class Refusing(CpuStandIn):
    """A stand-in that carries captured work out, and then raises `error` from the `first` capture on."""

    def __init__(self, error: Exception, first: int = 0) -> None:
        super().__init__()
        self._error = error
        self._num_left = first

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = super().capture(work)
        self._num_left -= 1
        if self._num_left < 0:
            raise self._error
        return graph


def start(folder: Path, runtime: CpuStandIn, **changes: Any) -> ModelRunner:
    limits = {"max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 4}
    runner = ModelRunner(ModelRunnerConfig(str(folder), device="cpu", **{**limits, **changes}), runtime)
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner


def generate(runner: ModelRunner, num_steps: int = 6) -> dict[str, list[int]]:
    driver = AheadDriver(runner, NUM_BLOCKS)
    for name, params in (("a", GREEDY), ("b", RANDOM), ("c", GREEDY)):
        driver.add(name, [ord(name) - ord("a"), 1, 2], params)
    for _ in range(num_steps):
        driver.step({name: request.num_left for name, request in driver.requests.items()})
    driver.land()
    return {name: request.outputs for name, request in driver.requests.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt2_checkpoint(tmp_path_factory.mktemp("gpt2"), n_embd=64)


@needs_native_kernels
def test_the_start_captures_all_sizes_and_nothing_is_captured_while_it_serves(folder: Path) -> None:
    runtime = CpuStandIn()
    runner = start(folder, runtime, max_num_seqs=30)  # 1, 2, 4, 8, 16, 24, 30, of two kinds and without a sampler
    graphs = "21 captured graphs of up to 30 rows use 0 MB"
    assert runner.backends()["decode"] == graphs
    driver = AheadDriver(runner, NUM_BLOCKS)
    for index in range(17):
        driver.add(f"{index}", [1, 2], SamplingParams(temperature=1.0, seed=1, presence_penalty=index % 3))
    for _ in range(3):
        driver.step({name: request.num_left for name, request in driver.requests.items()})
    driver.land()
    assert runner.backends()["decode"] == graphs


@needs_native_kernels
def test_given_sizes_are_captured_at_the_start(folder: Path) -> None:
    runner = start(folder, CpuStandIn(), cuda_graph_sizes=(3, 4))
    assert runner.backends()["decode"].startswith("6 captured graphs of up to 4 rows")


@needs_native_kernels
@pytest.mark.parametrize("first", [0, 3])
def test_without_memory_for_graphs_steps_run_operation_by_operation(folder: Path, first: int) -> None:
    runner = start(folder, Refusing(torch.OutOfMemoryError("CUDA out of memory"), first))
    assert generate(runner) == generate(start(folder, CpuStandIn()))
    assert f"no memory for {9 - first} more" in runner.backends()["decode"]


@needs_native_kernels
@pytest.mark.parametrize("first", [0, 3])
def test_steps_that_cannot_be_captured_run_operation_by_operation_with_a_reason_in_the_log(
    folder: Path, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    runner = start(folder, Refusing(GraphCaptureError("not permitted while a stream is capturing"), first))
    assert generate(runner) == generate(start(folder, CpuStandIn()))
    assert runner.backends()["decode"] == "not captured: not permitted while a stream is capturing"
    assert "not permitted while a stream is capturing" in caplog.text


@needs_native_kernels
def test_steps_without_graphs_do_not_wait_for_the_device_either(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = start(folder, CpuStandIn(), enforce_eager=True)
    steps: Any = runner._steps
    guarded: list[str] = []

    def guard(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            guarded.append(name)
            with no_host_synchronisation():
                return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    guard(steps._model, "forward")
    guard(steps._model, "compute_logits")
    guard(steps._device_sampler._rows, "sample")
    guard(steps._rows, "advance")
    generate(runner, 3)
    assert guarded == ["forward", "compute_logits", "sample", "advance"] * 3


@needs_native_kernels
def test_graphs_are_dropped_when_memory_is_short_and_captured_again_with_the_next_step(folder: Path) -> None:
    expected = generate(start(folder, CpuStandIn()))
    runner = start(folder, CpuStandIn())
    runner._make_room()
    steps: Any = runner._steps
    assert not steps._graphs._graphs
    assert generate(runner) == expected
    assert steps._graphs._graphs
