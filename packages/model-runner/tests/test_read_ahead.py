"""What is read before a model is loaded: packed weights where there are some, else the checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmstack_model_files import ModelFilesError
from llmstack_model_runner.packed_files import cache_folder, files_digest
from llmstack_model_runner.read_ahead import start_reading, weight_files
from llmstack_types import ModelRunnerConfig


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def packed(model: Path, identity: str, used_s: int) -> Path:
    cache_folder().mkdir(parents=True, exist_ok=True)
    path = cache_folder() / f"{files_digest(model)}-{identity}.packed"
    path.write_bytes(b"packed")
    os.utime(path, (used_s, used_s))
    return path


def test_the_checkpoint_is_read_where_nothing_is_packed(model: Path) -> None:
    assert weight_files(ModelRunnerConfig(str(model), pack_cache=True)) == [model / "model.safetensors"]


def test_packed_weights_that_were_used_last_are_read_in_place_of_the_checkpoint(model: Path) -> None:
    packed(model, "old", 1_000)
    last = packed(model, "new", 2_000)
    (cache_folder() / "0123-other.packed").write_bytes(b"of another model")
    assert weight_files(ModelRunnerConfig(str(model), pack_cache=True)) == [last]
    assert weight_files(ModelRunnerConfig(str(model), pack_cache=False)) == [model / "model.safetensors"]


def test_each_rank_has_a_file(model: Path) -> None:
    files = [packed(model, name, used_s) for name, used_s in (("a", 3_000), ("b", 2_000), ("c", 1_000))]
    assert weight_files(ModelRunnerConfig(str(model), pack_cache=True, tensor_parallel_size=2)) == files[:2]


def test_a_model_without_weights_is_left_to_the_load(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError):
        weight_files(ModelRunnerConfig(str(model)))
    start_reading(ModelRunnerConfig(str(model)))  # whose thread raises nothing
