"""Captured steps with adapters hold what the start captures, whatever has failed or was placed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers import device_runners
from model_runner_helpers.ahead_driver import AheadDriver
from model_runner_helpers.cpu_stand_in import CpuStandIn
from model_runner_helpers.device_runners import GREEDY, NUM_BLOCKS, needs_native_kernels, start

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import identity_of, write_random_adapter
from llmstack_types import SamplingParams

LORA = {"max_num_seqs": 3, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
pytestmark = needs_native_kernels
folder = device_runners.folder


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return start(folder, CpuStandIn(), **LORA)


def add_adapter(runner: ModelRunner, folder: Path, path: Path, modules: Sequence[str] = ("c_attn", "c_proj")) -> str:
    identity = identity_of(write_random_adapter(path, folder, modules, seed=1), path.name)
    runner.add_adapter(identity, runner.read_adapter(identity, str(path)))
    return identity


def test_no_step_has_more_rows_than_tokens(folder: Path) -> None:
    assert (
        "graphs of up to 2 rows" in start(folder, CpuStandIn(), max_num_batched_tokens=2, **LORA).backends()["decode"]
    )


def test_what_is_captured_again_is_what_the_start_captures(runner: ModelRunner, folder: Path, tmp_path: Path) -> None:
    identity = add_adapter(runner, folder, tmp_path / "a")
    graphs: Any = runner._steps._graphs  # type: ignore[union-attr]
    at_start = set(graphs._graphs)
    runner._make_room()
    driver = AheadDriver(runner, NUM_BLOCKS)
    driver.add("a", [1, 2, 3], GREEDY, identity)
    driver.add("b", [4, 5, 6], SamplingParams(temperature=0.0, presence_penalty=1.0))
    driver.step({"a": 3, "b": 3})
    for names in (["a", "b"], ["b"], ["a"]):
        driver.step({name: driver.requests[name].num_left for name in names})
    driver.land()
    assert set(graphs._graphs)
    assert set(graphs._graphs) <= at_start


def test_steps_whose_adapters_change_experts_are_eager_and_others_stay_captured(
    runner: ModelRunner, folder: Path, tmp_path: Path
) -> None:
    layers: Any = runner._adapters._layers  # type: ignore[union-attr]
    part = next(part for name, part in layers.parts.items() if name.endswith("h.0.attn.c_attn"))
    layers.expert_layers.add(part.layer)  # no layer of this model is one, and captured steps of experts need a GPU
    runner.initialize_kv_cache(NUM_BLOCKS)
    steps: Any = runner._steps
    at_start = set(steps._graphs._graphs)
    identities = [add_adapter(runner, folder, tmp_path / name, [name]) for name in ("c_attn", "c_proj")]
    runner._make_room()
    driver = AheadDriver(runner, NUM_BLOCKS)
    for name, identity in zip("ab", identities, strict=True):
        driver.add(name, [1, 2, 3], GREEDY, identity)
    driver.step({"a": 3, "b": 3})
    eager: list[int] = []
    run_eagerly = steps._run_eagerly

    def note_and_run(step: Any, *rest: Any) -> Any:
        eager.append(len(step.rows))
        return run_eagerly(step, *rest)

    steps._run_eagerly = note_and_run
    for names in (["a", "b"], ["a"], ["b"], ["b"]):
        driver.step({name: driver.requests[name].num_left for name in names})
    driver.land()
    assert eager == [2, 1]
    assert set(steps._graphs._graphs)
    assert set(steps._graphs._graphs) <= at_start


def test_a_step_that_is_tried_again_after_a_failed_allocation_has_its_adapters(
    runner: ModelRunner, folder: Path, tmp_path: Path
) -> None:
    identity = add_adapter(runner, folder, tmp_path / "a")
    outputs = []
    for is_failing in (False, True):
        driver = AheadDriver(runner, NUM_BLOCKS)
        driver.add("a", [1, 2, 3], GREEDY, identity)
        driver.add("b", [1, 2, 3], GREEDY)
        driver.step({"b": 3})
        layers: Any = runner._adapters._layers  # type: ignore[union-attr]
        send = layers.send
        if is_failing:

            def fail(arrays: Any, layers: Any = layers, send: Any = send) -> Any:
                layers.send = send
                raise torch.OutOfMemoryError("CUDA out of memory")

            layers.send = fail
        driver.step({"a": 3})
        for _ in range(5):
            driver.step({"a": driver.requests["a"].num_left})
        driver.land()
        assert not driver.requests["a"].error
        outputs.append(driver.requests["a"].outputs)
        runner.initialize_kv_cache(NUM_BLOCKS)
    assert outputs[0] == outputs[1]
