"""Modules of sentence-transformers are read in their order, and others refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_model_files import DenseModule, ModelFilesError, SentenceModules, read_modules

ST = "sentence_transformers.models."


def write(folder: Path, *kinds: str, dense: dict[str, Any] | None = None) -> None:
    paths = [f"{index}_{kind.rpartition('.')[2]}" if index else "" for index, kind in enumerate(kinds)]
    types = [kind if "." in kind else ST + kind for kind in kinds]
    modules = [{"idx": i, "path": path, "type": kind} for i, (path, kind) in enumerate(zip(paths, types, strict=True))]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir(exist_ok=True)
        sizes = {"in_features": 8, "out_features": 4, "bias": False}
        (folder / path / "config.json").write_text(json.dumps(sizes | (dense or {})))


def test_those_of_embedding_gemma_follow_each_other(tmp_path: Path) -> None:
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    write(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize", dense=identity)
    layers = tuple(DenseModule(f"{index}_Dense", 8, 4, False, "Identity") for index in (2, 3))
    found = read_modules(tmp_path)
    assert found == SentenceModules("1_Pooling", layers, True)
    assert found is not None
    assert not found.of_tokens


def test_a_layer_without_pooling_is_of_tokens(tmp_path: Path) -> None:
    write(tmp_path, "Transformer", "pylate.models.Dense.Dense")
    found = read_modules(tmp_path)
    assert found is not None
    assert found.of_tokens
    assert found.normalizes
    assert found.dense[0].activation == "Tanh"  # what sentence-transformers has where nothing is said


def test_a_folder_without_modules_has_none(tmp_path: Path) -> None:
    assert read_modules(tmp_path) is None


@pytest.mark.parametrize(
    ("kinds", "dense", "reason"),
    [
        (("Transformer", "Pooling", "LayerNorm"), {}, "a module of type 'LayerNorm' is not supported"),
        (("Transformer", "Pooling", "Normalize", "Dense"), {}, "in the order .* are not supported"),
        (("Transformer", "Pooling", "Pooling"), {}, "in the order .* are not supported"),
        (("Transformer", "Pooling", "Dense"), {"in_features": 0}, "must be positive integers"),
        (("Transformer", "Dense"), {"use_residual": True}, "use_residual is not supported"),
    ],
)
def test_what_would_give_other_vectors_is_refused(
    tmp_path: Path, kinds: tuple[str, ...], dense: dict[str, Any], reason: str
) -> None:
    write(tmp_path, *kinds, dense=dense)
    with pytest.raises(ModelFilesError, match=reason):
        read_modules(tmp_path)
