"""Modules of sentence-transformers: what follows a model in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llmstack_model_files.folder import ModelFilesError, read_json, read_json_array

COLBERT = "HF_ColBERT"
"""Architecture of BERT with a layer over the vector of each token, which has no `modules.json`."""
_KINDS = ("Transformer", "Pooling", "Dense", "Dropout", "Normalize")


class DenseModule(NamedTuple):
    """A linear layer with an activation.

    Attributes:
        path: Folder with its `config.json` and `model.safetensors`.
        activation: Name of the activation's class.
    """

    path: str
    in_features: int
    out_features: int
    has_bias: bool
    activation: str


class SentenceModules(NamedTuple):
    """The modules of a folder, in the order in which they run.

    Attributes:
        pooling: Folder of the `Pooling` module; None without one.
        dense: Linear layers; over pooled vectors, or over those of tokens where nothing is pooled.
        normalizes: Whether vectors get length 1 at the end.
    """

    pooling: str | None
    dense: tuple[DenseModule, ...]
    normalizes: bool

    @property
    def of_tokens(self) -> bool:
        """Whether the model was trained for a vector of each token, as ColBERT is."""
        return self.pooling is None and bool(self.dense)


def read_modules(folder: Path) -> SentenceModules | None:
    """The modules that `modules.json` lists; None without that file.

    Raises:
        ModelFilesError: A file cannot be read, or a module or its place is not supported: vectors would be others.
    """
    entries = read_json_array(folder, "modules.json", required=False)
    if entries is None:
        return None
    kinds = [_kind(entry) for entry in entries]
    paths = [str(entry.get("path", "")) for entry in entries]
    places = [_KINDS.index(kind) for kind in kinds if kind != "Dropout"]  # which drops nothing here
    if places != sorted(places) or any(kinds.count(kind) > 1 for kind in _KINDS if kind not in ("Dense", "Dropout")):
        raise ModelFilesError(f"modules.json: modules in the order {', '.join(kinds)} are not supported.")
    dense = [_read_dense(folder, path) for kind, path in zip(kinds, paths, strict=True) if kind == "Dense"]
    pooling = next((path for kind, path in zip(kinds, paths, strict=True) if kind == "Pooling"), None)
    if pooling is None and dense:
        return SentenceModules(None, tuple(dense), normalizes=True)  # such vectors are compared by their products
    return SentenceModules(pooling, tuple(dense), "Normalize" in kinds)


def _kind(entry: object) -> str:
    kind = str(entry.get("type", "")).rpartition(".")[2] if isinstance(entry, Mapping) else ""
    if kind not in _KINDS:
        raise ModelFilesError(f"modules.json: a module of type {kind[:64]!r} is not supported.")
    return kind


def _read_dense(folder: Path, path: str) -> DenseModule:
    name = f"{path}/config.json"
    config = read_json(folder, name)
    in_features: Any = config.get("in_features")
    out_features: Any = config.get("out_features")
    if not all(type(size) is int and 0 < size <= 1 << 20 for size in (in_features, out_features)):
        raise ModelFilesError(f"{name}: in_features and out_features must be positive integers.")
    if config.get("use_residual"):
        raise ModelFilesError(f"{name}: use_residual is not supported.")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    return DenseModule(path, in_features, out_features, config.get("bias") is not False, activation)
