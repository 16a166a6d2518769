"""Weights of several ranks change in place in all of them, or in none."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from parallel_helpers.families import write_family
from parallel_helpers.schedules import NUM_BLOCKS, Run, drive, make_config, run_schedule
from parallel_helpers.thread_peers import ThreadPeers
from safetensors.torch import load_file, save_file

from llmstack_model_files import weights_digest
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import identity_of, write_random_adapter, write_random_weights
from llmstack_model_runner.weights import load_weights
from llmstack_parallel.errors import LostRankError
from llmstack_parallel.runner import ParallelRunner
from llmstack_types import EngineStartError, ModelRunnerConfig
from llmstack_types.errors import WeightsReloadedError

TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}
LOAD = "llmstack_model_runner.loading.load_weights"
RANKS = pytest.mark.parametrize("ranks", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
OF_ONE_RANK = {
    # The rows of the last heads are those of rank 1; the last stage is rank 0, and the first one rank 1.
    "tensor": (TENSOR, "model.layers.0.self_attn.q_proj.weight"),
    "first stage": (PIPELINE, "model.layers.0.self_attn.q_proj.weight"),
    "last stage": (PIPELINE, "model.layers.2.self_attn.q_proj.weight"),
}


@contextmanager
def started(config: ModelRunnerConfig) -> Iterator[ParallelRunner]:
    runner = ParallelRunner(config, ThreadPeers)
    try:
        runner.load_model()
        runner.initialize_kv_cache(NUM_BLOCKS)
        yield runner
    finally:
        runner.shutdown()


def write_pair(folder: Path, name: str = "llama") -> tuple[Path, Path, Path]:
    """Two checkpoints of one shape; and of the second one the weights alone."""
    first = write_family(folder / "first", name)
    second = write_random_weights(write_family(folder / "second", name), seed=4, spread=0.25)
    alone = folder / "weights"
    alone.mkdir()
    shutil.copy(second / "model.safetensors", alone)
    return first, second, alone


def in_rank_1(do: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """`instead` in the thread of another rank, and `do` in that of rank 0."""

    def chosen(*arguments: Any, **fields: Any) -> Any:
        is_rank_0 = threading.current_thread() is threading.main_thread()
        return (do if is_rank_0 else instead)(*arguments, **fields)

    return chosen


def refuse(*_: object, **__: object) -> None:
    raise EngineStartError("the disk is gone")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", TENSOR),
        ("llama", PIPELINE),
        ("llama with one kv head", TENSOR | {"quantization": "int8"}),
        *(
            pytest.param(name, ranks | more, marks=pytest.mark.full)
            for name in ("gpt2", "mixtral", "deepseek v3", "gemma 2", "gpt oss")
            for ranks in (TENSOR, PIPELINE, TENSOR | PIPELINE)
            for more in ({}, {"dtype": "bfloat16"})
        ),
        pytest.param("mixtral", TENSOR | {"enable_expert_parallel": True}, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_ranks_compute_as_those_that_were_started_with_the_weights(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    first, second, alone = write_pair(tmp_path, name)
    expected: Run = run_schedule(make_config(second, **options), 1)
    with started(make_config(first, **options)) as runner:
        before, digest = drive(runner, 1), runner.backends()["weights"]
        runner.update_weights(str(alone))
        assert drive(runner, 1) == expected != before
        assert runner.backends()["weights"] != digest
        runner.sleep(2)
        runner.wake_up()
        assert drive(runner, 1) == expected  # not those of the start
        runner.update_weights(str(first))
        assert drive(runner, 1) == before


@pytest.mark.parametrize("case", OF_ONE_RANK)
def test_weights_that_do_not_fit_in_one_rank_change_nothing_in_any(case: str, tmp_path: Path) -> None:
    first, _, alone = write_pair(tmp_path)
    ranks, name = OF_ONE_RANK[case]
    tensors = load_file(alone / "model.safetensors")
    tensors[name][-1] = math.nan
    save_file(tensors, alone / "model.safetensors")
    with started(make_config(first, **ranks)) as runner:
        own = runner._runner
        assert own is not None
        before, model = drive(runner, 1), own._model
        if case != "last stage":
            own.check_weights(str(alone))  # it does not read what the other rank refuses
        with pytest.raises(ValueError, match="NaN or infinite"):
            runner.update_weights(str(alone))
        assert own._model is model  # nothing was loaded
        assert drive(runner, 1) == before


@RANKS
@pytest.mark.parametrize("is_rank_0", [True, False], ids=["rank 0", "another rank"])
def test_weights_that_one_rank_cannot_load_leave_all_with_the_old_ones(
    ranks: dict[str, Any], is_rank_0: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, alone = write_pair(tmp_path)

    def failing(model: Any, folder: Path, *arguments: Any, **fields: Any) -> None:
        (refuse if folder == alone else load_weights)(model, folder, *arguments, **fields)

    with started(make_config(first, **ranks)) as runner:
        before = drive(runner, 1)
        monkeypatch.setattr(LOAD, in_rank_1(*((failing, load_weights) if is_rank_0 else (load_weights, failing))))
        with pytest.raises(WeightsReloadedError, match="the disk is gone"):
            runner.update_weights(str(alone))
        assert drive(runner, 1) == before
        monkeypatch.setattr(LOAD, load_weights)
        runner.update_weights(str(alone))
        assert drive(runner, 1) != before


def test_other_weights_on_another_node_leave_all_with_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, alone = write_pair(tmp_path)
    with started(make_config(first, **TENSOR)) as runner:
        before = drive(runner, 1)
        other = in_rank_1(weights_digest, lambda *_, **__: "of another folder")
        monkeypatch.setattr("llmstack_model_runner.loading.weights_digest", other)
        with pytest.raises(WeightsReloadedError, match="other weights on another node"):
            runner.update_weights(str(alone))
        assert drive(runner, 1) == before


@pytest.mark.parametrize("method", ["check_weights", "exchange_weights"])
def test_a_rank_that_is_lost_over_a_change_ends_all(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, alone = write_pair(tmp_path)

    def crash(*_: object) -> None:
        raise RuntimeError("it crashes")

    with started(make_config(first, **TENSOR)) as runner:
        monkeypatch.setattr(ModelRunner, method, in_rank_1(getattr(ModelRunner, method), crash))
        for _ in range(2):  # nor is there a later change
            with pytest.raises(LostRankError, match="it crashes"):
                runner.update_weights(str(alone))


def test_what_no_rank_can_load_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, alone = write_pair(tmp_path)
    with started(make_config(first, **TENSOR)) as runner:
        monkeypatch.setattr(LOAD, refuse)
        with pytest.raises(EngineStartError, match="the weights before cannot be loaded again: the disk is gone"):
            runner.update_weights(str(alone))


def test_adapters_are_read_again(tmp_path: Path) -> None:
    first, second, alone = write_pair(tmp_path, "gpt2")
    options = {**TENSOR, "enable_lora": True, "max_lora_rank": 8}
    path = write_random_adapter(tmp_path / "style", first, ("c_attn", "lm_head"), 1)
    adapters = {identity_of(path, "style"): path}
    expected = run_schedule(make_config(second, **options), 1, adapters)
    with started(make_config(first, **options)) as runner:
        runner.update_weights(str(alone))
        for identity in adapters:
            runner.announce_adapter(identity, str(path))
            runner.add_adapter(identity, runner.read_adapter(identity, str(path)))
        assert drive(runner, 1, [None, *adapters]) == expected
