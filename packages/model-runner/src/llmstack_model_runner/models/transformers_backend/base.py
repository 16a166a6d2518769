"""Loading, which decoders and encoders of transformers share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmstack_kernels.linear import AnyStoredWeight
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight
from llmstack_model_runner.layers.packing import Packing, packing
from llmstack_model_runner.layers.weight_slot import AnyWeight, WeightKind, WeightSlot, finite, plain
from llmstack_model_runner.models.base import Model
from llmstack_model_runner.models.transformers_backend.load import describe_version, load_model, release_files
from llmstack_model_runner.models.transformers_backend.modules import pack_modules
from llmstack_model_runner.models.transformers_backend.probe import ProbeError
from llmstack_model_runner.models.transformers_backend.resolve import (
    UnsupportedByTransformersError,
    build_on_meta,
    check_context,
)


class TransformersBase(Model):
    """A model whose code and weights' names are those of transformers.

    The constructor of a subclass sets `_config`, `_model_class`, `_dtype`, `_device`, and `_attention_name`: of the
    attention that it is loaded with, None for what transformers would choose.
    """

    implementation = describe_version()
    loads_by_slots = False
    keeps_numeric_contract: ClassVar[bool] = False  # norms, activations, some matrix products are of transformers

    _config: PreTrainedConfig
    _model_class: type[PreTrainedModel]
    _dtype: torch.dtype
    _device: torch.device
    _attention_name: str | None
    _model: PreTrainedModel

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all tensors under the model's names, which can differ from the checkpoint's; shared ones once."""
        model = build_on_meta(self._config, self._model_class, self._dtype, self._attention_name)
        saved = model.state_dict()
        tensors = [*model.named_parameters(), *((name, t) for name, t in model.named_buffers() if name in saved)]
        return {name: WeightSlot(tuple(tensor.shape), _not_by_slot, _kind(name, tensor)) for name, tensor in tensors}

    def limit_context(self, max_model_len: int) -> None:
        """Raises for contexts in which rows of a batch would not be independent."""
        check_context(self._config, self._model_class.__name__, max_model_len)

    def load_weights(self, weights: Iterable[tuple[str, AnyWeight]]) -> None:
        """Loads through transformers, which renames and joins tensors of older checkpoints."""
        needed = ((self.rename(name), _checked(name, weight)) for name, weight in weights if not self.is_ignored(name))
        self._model = load_model(
            self._config, self._model_class, needed, self._dtype, self._device, attention=self._attention_name
        )

    def _pack(self, model: nn.Module, *, is_needed: bool = False) -> None:
        """Packs the layers of a part, where that is of use or `is_needed`, and lets go of the files."""
        if self._device.type == "cpu" or packing() != Packing() or is_needed:
            pack_modules(model)
            release_files(self._model)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Makes any exception inside the reason that the model is not supported: its code can raise anything.

        Raises:
            UnsupportedByTransformersError: Something was raised.
        """
        try:
            yield
        except ProbeError as error:
            raise self._unsupported(str(error)) from error
        except Exception as error:
            raise self._unsupported(describe_error(error)) from error

    def _unsupported(self, reason: str) -> UnsupportedByTransformersError:
        return UnsupportedByTransformersError(self._model_class.__name__, reason)


def describe_error(error: Exception) -> str:
    """The reason of a model whose code raises an error while it is tried."""
    return f"running it raises {type(error).__name__}, {' '.join(str(error).split())[:200]}"


def _not_by_slot(tensor: torch.Tensor) -> None:
    raise RuntimeError("tensors are renamed and joined while loading; `load_weights` loads all of them at once")


def _checked(name: str, weight: AnyWeight) -> torch.Tensor | UnreadWeight:
    """The weight if it is finite; of a quantized one its reader says so."""
    if isinstance(weight, UnreadWeight):
        return weight
    if isinstance(weight, AnyStoredWeight):
        raise TypeError("quantized weights are read where they are needed")
    try:
        found = weight if isinstance(weight, torch.Tensor) else weight.read(None)
        return plain(found) if name.endswith("weight") else finite(found)  # others may be masks or positions
    except ValueError as error:
        raise ValueError(f"The weights cannot be loaded: {name[:128]} {error}.") from None


def _kind(name: str, tensor: torch.Tensor) -> WeightKind:
    if name.endswith("bias"):
        return WeightKind.BIAS
    return WeightKind.MATRIX if tensor.ndim > 1 else WeightKind.SCALE
