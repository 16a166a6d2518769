"""Decode steps are recorded at few sizes, where that goes; where it does not, they run all the same, and say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmstack_kernels.graph_safety import no_host_synchronisation
from llmstack_kernels.native import library
from llmstack_model_runner.device.decode_graphs import decode_sizes
from llmstack_model_runner.device.runtime import Graph, NotRecordableError
from llmstack_model_runner.device.testing import AheadDriver
from llmstack_model_runner.device.twin import CpuTwin
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import write_gpt2_checkpoint
from llmstack_types import ModelRunnerConfig, SamplingParams

NUM_BLOCKS = 32
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=1.0, seed=3)

needs_native_kernels = pytest.mark.skipif(library() is None, reason="the native kernels are not built")


def test_sizes_are_dense_where_a_row_counts_and_end_at_the_most_there_can_be() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(3) == [1, 2, 3]
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert decode_sizes(256)[-3:] == [240, 248, 256]
    assert decode_sizes(300)[-4:] == [256, 272, 288, 300]
    assert decode_sizes(10_000)[-1] == 512
    assert len(decode_sizes(10_000)) == 51


def test_sizes_that_are_given_are_taken_as_far_as_there_can_be_as_many_rows() -> None:
    assert decode_sizes(16, (32, 4, 8, 4)) == [4, 8]
    assert decode_sizes(2, (4,)) == []


class Refusing(CpuTwin):
    """A twin that carries recorded work out, and then raises `error` from the `first` recording on."""

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


def start(folder: Path, runtime: CpuTwin, **changes: Any) -> ModelRunner:
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
def test_the_start_records_the_largest_size_and_powers_of_two_and_others_wait_for_their_first_step(
    folder: Path,
) -> None:
    runner = start(folder, CpuTwin(), max_num_seqs=30)  # 1, 2, 4, 8, 16, 30 of two kinds; 2 with masks
    assert runner.backends()["decode"] == "13 recordings of up to 30 rows take 0 MB"
    driver = AheadDriver(runner, NUM_BLOCKS)
    for index in range(17):
        driver.add(f"{index}", [1, 2], GREEDY)
    for _ in range(2):
        driver.step({name: request.num_left for name, request in driver.requests.items()})
    driver.land()
    assert runner.backends()["decode"].startswith("14 recordings")


@needs_native_kernels
def test_sizes_that_are_given_are_recorded_at_the_start(folder: Path) -> None:
    runner = start(folder, CpuTwin(), cuda_graph_sizes=(3, 4))
    assert runner.backends()["decode"].startswith("5 recordings of up to 4 rows")


@needs_native_kernels
@pytest.mark.parametrize("first", [0, 3])
def test_where_there_is_no_memory_to_record_steps_run_operation_by_operation(folder: Path, first: int) -> None:
    runner = start(folder, Refusing(torch.OutOfMemoryError("CUDA out of memory"), first))
    assert generate(runner) == generate(start(folder, CpuTwin()))
    assert f"no room for {7 - first} more" in runner.backends()["decode"]


@needs_native_kernels
@pytest.mark.parametrize("first", [0, 3])
def test_what_cannot_be_recorded_runs_operation_by_operation_and_says_why(
    folder: Path, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    runner = start(folder, Refusing(NotRecordableError("not permitted while a stream is recorded"), first))
    assert generate(runner) == generate(start(folder, CpuTwin()))
    assert runner.backends()["decode"] == "not recorded: not permitted while a stream is recorded"
    assert "not permitted while a stream is recorded" in caplog.text


@needs_native_kernels
def test_steps_that_are_not_recorded_do_not_wait_for_the_device_either(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = start(folder, CpuTwin(), enforce_eager=True)
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
def test_recordings_go_where_memory_is_short_and_come_back_with_the_next_step(folder: Path) -> None:
    expected = generate(start(folder, CpuTwin()))
    runner = start(folder, CpuTwin())
    runner._make_room()
    steps: Any = runner._steps
    assert not steps._graphs._graphs
    assert generate(runner) == expected
    assert steps._graphs._graphs
