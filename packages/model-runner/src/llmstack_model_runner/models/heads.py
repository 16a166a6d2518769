"""Heads of a model that pools: labels, and linear layers over vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from llmstack_model_files import (
    COLBERT,
    DenseModule,
    ModelFilesError,
    artifact_path,
    check_safetensors,
    read_modules,
    safetensors_files,
)
from llmstack_model_runner.models.base import Classifier, Model
from llmstack_model_runner.models.label_head import LabelHead

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "GELU": torch.nn.functional.gelu,
    "Identity": torch.clone,
    "ReLU": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}
_SMALL_WEIGHT = 0.02  # standard deviation of dummy weights


class MapVectors(Protocol):
    """Maps vectors to others."""

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """[n, in_features] of any floating type to float32 [n, out_features]."""


class DenseLayers:
    """Linear layers, each with an activation, in float32.

    Attributes:
        out_features: Size of the vectors behind the last one.
    """

    def __init__(self, modules: tuple[DenseModule, ...], weights: list[Mapping[str, torch.Tensor]]) -> None:
        self.out_features = modules[-1].out_features
        self._layers = [
            (weight["linear.weight"], weight.get("linear.bias"), _ACTIVATIONS[module.activation])
            for module, weight in zip(modules, weights, strict=True)
        ]

    @classmethod
    def read(cls, folder: Path, modules: tuple[DenseModule, ...], device: torch.device, *, is_dummy: bool) -> Self:
        """Reads the weights.

        Raises:
            ModelFilesError: They are missing, not finite or of a wrong shape, or an activation is not supported.
        """
        for module in modules:
            if module.activation not in _ACTIVATIONS:
                listed = ", ".join(_ACTIVATIONS)
                raise ModelFilesError(
                    f"{module.path}/config.json: activation_function {module.activation[:64]!r} is none of {listed}."
                )
        return cls(modules, [_read_weights(folder, module, device, is_dummy=is_dummy) for module in modules])

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Maps vectors, as `MapVectors` says it."""
        vectors = vectors.float()
        for weight, bias, activate in self._layers:
            vectors = activate(torch.nn.functional.linear(vectors, weight, bias))
        return vectors


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a pooling model, which follow its hidden states.

    Attributes:
        labels: Of a classifier.
        vectors: Of pooled vectors.
        tokens: Of the vector of each token.
    """

    labels: LabelHead | None = None
    vectors: DenseLayers | None = None
    tokens: DenseLayers | None = None

    @property
    def vector_size(self) -> int | None:
        """Numbers of a vector; None where that is the hidden size."""
        found = self.tokens or self.vectors
        return None if found is None else found.out_features


NO_HEADS = Heads()


def find_heads(
    model: Model, model_config: Mapping[str, Any], folder: Path, device: torch.device, *, is_dummy: bool
) -> Heads:
    """The heads of a model, from its configuration and the files of sentence-transformers beside it.

    `is_dummy`: Whether weights are drawn and not read.

    Raises:
        ModelFilesError: A module or its weights cannot be used.
        ValueError: The configuration names an unknown activation.
    """
    if isinstance(model, Classifier):
        return Heads(LabelHead(model, model_config))
    if COLBERT in (model_config.get("architectures") or ()):
        module = _colbert_layer(model_config, folder, is_dummy=is_dummy)
        return Heads(tokens=DenseLayers.read(folder, (module,), device, is_dummy=is_dummy))
    found = read_modules(folder)
    if found is None or not found.dense:
        return NO_HEADS
    layers = DenseLayers.read(folder, found.dense, device, is_dummy=is_dummy)
    return Heads(tokens=layers) if found.of_tokens else Heads(vectors=layers)


def _colbert_layer(model_config: Mapping[str, Any], folder: Path, *, is_dummy: bool) -> DenseModule:
    """The layer `linear`, which stands among the weights of the model."""
    in_features, out_features = int(model_config.get("hidden_size", 768)), int(model_config.get("dim", 128))
    if not is_dummy:
        shapes = {
            name: info.shape for path in safetensors_files(folder) for name, info in check_safetensors(path).items()
        }
        if len(shapes.get("linear.weight", ())) != 2:
            raise ModelFilesError(f"{COLBERT}: the weights have no matrix 'linear.weight', which maps each token.")
        out_features, in_features = shapes["linear.weight"]
    return DenseModule("", in_features, out_features, has_bias=False, activation="Identity")


def _read_weights(
    folder: Path, module: DenseModule, device: torch.device, *, is_dummy: bool
) -> Mapping[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (module.out_features, module.in_features)}
    if module.has_bias:
        shapes["linear.bias"] = (module.out_features,)
    if is_dummy:
        return {name: torch.randn(shape, device=device) * _SMALL_WEIGHT for name, shape in shapes.items()}
    paths = safetensors_files(folder) if not module.path else [_file_of(folder, module)]
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        check_safetensors(path)
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                found |= {name: file.get_tensor(name).float().to(device) for name in shapes if name in names}
        except SafetensorError as error:
            raise ModelFilesError(f"{path.name} cannot be read as safetensors.") from error
    for name, shape in shapes.items():
        if name not in found or tuple(found[name].shape) != shape or not found[name].isfinite().all():
            raise ModelFilesError(
                f"{module.path or 'the model'}: {name} must be finite numbers of shape {list(shape)}."
            )
    return found


def _file_of(folder: Path, module: DenseModule) -> Path:
    name = f"{module.path}/model.safetensors"
    path = artifact_path(folder, name)
    if path is None:
        raise ModelFilesError(f"{name} is missing; weights in other formats can run code and are not read.")
    return path
