"""Weights of a runner change in place, or stay as they are."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmstack_model_files import ModelFilesError
from llmstack_model_runner import loading
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.loading import check_weights
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver, identity_of, write_gpt2_checkpoint, write_random_adapter
from llmstack_structured_output.testing import write_byte_tokenizer
from llmstack_types import EngineStartError, ModelRunnerConfig, SamplingParams
from llmstack_types.errors import WeightsReloadedError

NUM_BLOCKS = 32
PARAMS = SamplingParams(temperature=0.0, logprobs=5)
PROMPT = [5, 9, 2, 44, 7, 1, 30]


def started(folder: Path, **fields: object) -> ModelRunner:
    values = {"max_model_len": 64, "block_size": 4, "device": "cpu", "max_num_seqs": 4, **fields}
    runner = ModelRunner(ModelRunnerConfig(str(folder), **values))  # type: ignore[arg-type]  # test values
    runner.load_model()
    torch.set_num_threads(1)
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner


def answer(runner: ModelRunner) -> list[tuple[list[int], list[float]]]:
    """Tokens with log-probabilities, which differ with the weights."""
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("a", PROMPT, PARAMS)
    found = []
    for _ in range(6):
        output = driver.step({"a": len(PROMPT) if not found else 1})
        (entry,) = output.logprobs["a"]
        found.append((list(entry.token_ids), list(entry.logprobs)))
    driver.remove("a")
    driver.step({})
    return found


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints of one shape; of the second one the weights alone."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = write_gpt2_checkpoint(tmp_path / "first", seed=1)
    second = write_gpt2_checkpoint(tmp_path / "second", seed=2)
    shutil.copytree(second, tmp_path / "whole")
    (second / "config.json").unlink()
    return first, second


@pytest.mark.parametrize(
    "fields", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}, {"load_format": "dummy"}],
    ids=["as they are", "rounded", "in another type", "in place of dummy weights"],
)  # fmt: skip
def test_it_computes_as_one_that_was_started_with_the_weights(
    folders: tuple[Path, Path], fields: dict[str, object], tmp_path: Path
) -> None:
    first, second = folders
    runner = started(first, **fields)
    before, digest = answer(runner), runner.backends()["weights"]
    runner.update_weights(str(second))
    expected = answer(started(tmp_path / "whole", **{**fields, "load_format": "auto"}))
    assert answer(runner) == expected != before
    assert runner.backends()["weights"] != digest
    runner.sleep(2)
    runner.wake_up()
    assert answer(runner) == expected  # not those of the start
    if "load_format" not in fields:
        runner.update_weights(str(first))
        assert answer(runner) == before


@pytest.mark.parametrize("change", ["missing", "shape", "nan", "integers", "unread"])
def test_weights_that_do_not_fit_change_nothing(folders: tuple[Path, Path], change: str) -> None:
    first, second = folders
    file = second / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = tensors[name][1:].contiguous()
    elif change == "nan":
        tensors[name][0] = torch.nan
    elif change == "integers":
        tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, file)
    if change == "unread":
        file.write_bytes(file.read_bytes()[:-8])
    runner = started(first)
    before, model = answer(runner), runner._model
    with pytest.raises(ValueError):
        runner.update_weights(str(second))
    assert runner._model is model  # nothing was loaded
    assert answer(runner) == before


@pytest.mark.parametrize("error_type", [EngineStartError, ModelFilesError, ValueError])
def test_weights_that_cannot_be_loaded_after_all_make_room_for_the_old_ones(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, error_type: type[Exception]
) -> None:
    first, second = folders
    runner = started(first)
    before, load = answer(runner), loading.load_weights
    made: list[weakref.ref[object]] = []

    def failing(model: object, folder: Path, *arguments: object, **fields: object) -> None:
        if folder == second:
            made.append(weakref.ref(model))
            raise error_type("the disk is gone")
        assert made[0]() is None  # there is room for one copy
        load(model, folder, *arguments, **fields)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(loading, "load_weights", failing)
    with pytest.raises(WeightsReloadedError, match="the disk is gone"):
        runner.update_weights(str(second))
    assert answer(runner) == before


def test_texts_of_tokens_outlive_the_weights(folders: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = folders
    (tmp_path / "tokenizer").mkdir()
    write_byte_tokenizer(tmp_path / "tokenizer")
    runner = started(first, tokenizer_path=str(tmp_path / "tokenizer"))
    runner.read_token_texts()
    shutil.rmtree(tmp_path / "tokenizer")
    runner.update_weights(str(second))
    assert runner._batch is not None
    assert runner._batch.sampling.texts.text_of(65) == b"A"


def test_another_configuration_is_refused(folders: tuple[Path, Path]) -> None:
    first, second = folders
    own = json.loads((first / "config.json").read_text())
    config = ModelRunnerConfig(str(first), device="cpu", max_model_len=64)
    cpu, whole = torch.device("cpu"), Sharding()
    (second / "config.json").write_text(json.dumps({**own, "transformers_version": "0", "torch_dtype": "float16"}))
    assert check_weights(config, str(second), cpu, whole).weights_folder == str(second)
    (second / "config.json").write_text(json.dumps({**own, "layer_norm_epsilon": 0.1}))
    with pytest.raises(ValueError, match="another 'layer_norm_epsilon'"):
        check_weights(config, str(second), cpu, whole)


def test_one_tensor_at_a_time_is_read_for_the_checks(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folders
    alive: list[int] = []
    held = []
    from llmstack_model_runner.weights import load

    read = load._FileTensor.read

    def counted(self: object, part: object) -> torch.Tensor:
        tensor = read(self, part)  # type: ignore[arg-type]  # passed on
        held.append(weakref.ref(tensor))
        alive.append(sum(one() is not None for one in held))
        return tensor

    monkeypatch.setattr(load._FileTensor, "read", counted)
    check_weights(
        ModelRunnerConfig(str(first), device="cpu", max_model_len=64), str(second), torch.device("cpu"), Sharding()
    )
    assert len(alive) > 10
    assert max(alive) <= 2


def test_a_runner_with_adapters_keeps_no_weights_while_it_sleeps(folders: tuple[Path, Path], tmp_path: Path) -> None:
    runner = started(folders[0], enable_lora=True, max_lora_rank=8)
    path = write_random_adapter(tmp_path / "adapter", folders[0], ["c_attn"], seed=1)
    identity = identity_of(path)
    adapter = runner.read_adapter(identity, str(path))
    runner.add_adapter(identity, adapter)
    model = weakref.ref(runner._model)
    runner.sleep(2)
    gc.collect()
    assert model() is None
    for call in (lambda: runner.add_adapter(identity, adapter), lambda: runner.read_adapter(identity, str(path))):
        with pytest.raises(RuntimeError, match="the model is not loaded"):
            call()
    runner.wake_up()
    runner.add_adapter(identity, runner.read_adapter(identity, str(path)))
