"""The CPU stand-in of a GPU raises where a GPU would go wrong."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_runner_helpers.cpu_stand_in import CpuStandIn, DeviceRuleError
from model_runner_helpers.device_runners import needs_native_kernels

from llmstack_kernels.graph_safety import HostSynchronisationError
from llmstack_model_runner.device.staging import Staging
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import write_gpt2_checkpoint
from llmstack_types import EngineStartError, ModelRunnerConfig


def test_a_result_is_not_there_before_it_was_waited_for() -> None:
    fetched: Any = CpuStandIn().fetch([torch.tensor([1, 2])])
    assert fetched._hosts[0].tolist() != [1, 2]
    assert fetched.wait()[0].tolist() == [1, 2]
    assert fetched.wait()[0].tolist() == [1, 2]


def test_a_result_must_not_be_overwritten_while_it_travels() -> None:
    result = torch.tensor([1.0, float("nan")])
    fetched = CpuStandIn().fetch([result])
    result[0] = 2.0
    with pytest.raises(DeviceRuleError, match="overwritten"):
        fetched.wait()


def test_staging_memory_must_not_change_under_a_copy() -> None:
    runtime = CpuStandIn()
    memory = runtime.staging(16)
    _, transfer = runtime.send(memory[:8])
    with pytest.raises(DeviceRuleError, match="used again"):
        runtime.send(memory[4:12])
    memory[3] = 0
    with pytest.raises(DeviceRuleError, match="was written"):
        transfer.wait()


def test_the_ring_of_staging_memory_waits_for_copies_and_returns_what_was_sent() -> None:
    staging = Staging(CpuStandIn())
    rng = np.random.default_rng(0)
    for size in (0, 1, 3, 50_000, 7, 200_000, 2, 2, 2, 2, 2):
        arrays: list[Any] = [
            rng.integers(0, 9, size),
            rng.integers(0, 9, (size, 3), dtype=np.int32),
            rng.random(size) < 0.5,
        ]
        for array, tensor in zip(arrays, staging.send(arrays), strict=True):
            assert np.array_equal(tensor.numpy(), array)
            assert tensor.numpy().dtype == array.dtype


def test_captured_work_is_replayed_on_the_same_memory() -> None:
    total, step = torch.zeros(3), torch.ones(3)
    graph = CpuStandIn().capture(lambda: total.add_(step))  # type: ignore[arg-type]  # the returned value is not used
    assert total.tolist() == [2.0] * 3
    step.fill_(5.0)
    graph.replay()
    assert total.tolist() == [7.0] * 3


class Changing:
    """Work that is not the same each time, by whatever `change` does to it."""

    def __init__(self) -> None:
        self.source, self.target, self.factor, self.num_additions = torch.ones(4), torch.zeros(4), 2, 1

    def work(self) -> None:
        for _ in range(self.num_additions):
            self.target.add_(self.source, alpha=self.factor)


def _other_memory(work: Changing) -> None:
    work.source = work.source.clone()


def _other_number(work: Changing) -> None:
    work.factor = 3


def _other_branch(work: Changing) -> None:
    work.num_additions = 2


def _other_shape(work: Changing) -> None:
    work.source = work.source[:1]


@pytest.mark.parametrize("change", [_other_memory, _other_number, _other_branch, _other_shape])
def test_captured_work_must_not_change(change: Callable[[Changing], None]) -> None:
    changing = Changing()
    graph = CpuStandIn().capture(changing.work)
    graph.replay()
    change(changing)
    with pytest.raises(DeviceRuleError, match=r"was captured|were captured"):
        graph.replay()


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero, bool])
def test_captured_work_must_not_read_from_the_device(read: Callable[[torch.Tensor], object]) -> None:
    value = torch.ones(1)
    with pytest.raises(HostSynchronisationError):
        CpuStandIn().capture(lambda: read(value))  # type: ignore[arg-type]  # the returned value is not used


FAULT_TO_TEXT = {
    "item": "HostSynchronisationError: item reads",
    "pointer": "DeviceRuleError: ('aten.select.int'",
    "number": "DeviceRuleError: ('aten.mul.Tensor'",
}


@needs_native_kernels
@pytest.mark.parametrize("fault", FAULT_TO_TEXT)
def test_a_model_that_breaks_a_rule_in_a_decode_is_caught(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_gpt2_checkpoint(tmp_path, n_embd=64)
    runner = ModelRunner(ModelRunnerConfig(str(folder), max_model_len=64, max_num_seqs=2), CpuStandIn())
    runner.load_model()
    model: Any = runner._model
    forward, calls, outside = model.forward, count(), torch.zeros(2, 1)

    def break_a_rule(token_ids: torch.Tensor, positions: torch.Tensor, metadata: Any, kv_caches: Any) -> torch.Tensor:
        hidden: torch.Tensor = forward(token_ids, positions, metadata, kv_caches)
        if metadata.query_start_loc_list is not None:
            return hidden  # not captured: everything is allowed
        if fault == "item":
            return hidden * float(positions[0].item() >= 0)
        return hidden + outside[next(calls) % 2] if fault == "pointer" else hidden * next(calls)

    model.forward = break_a_rule
    with pytest.raises(EngineStartError):  # not even the warm-up's decode can be computed
        runner.initialize_kv_cache(16)
    assert FAULT_TO_TEXT[fault] in caplog.text
