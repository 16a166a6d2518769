"""Encoders of classes of transformers, without the text model beside them."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.encoders.prompt_encoder import PromptEncoder
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightSlot
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.transformers_backend.load import load_model, release_files
from llmstack_model_runner.models.transformers_backend.paused_layers import PausedLayers
from llmstack_model_runner.models.transformers_backend.resolve import UnsupportedByTransformersError, build_on_meta
from llmstack_model_runner.models.transformers_backend.stored import Names
from llmstack_types import MediaItem

_TEXT_PARTS = ("model.language_model", "lm_head")


class EncoderPart:
    """The parts of a class besides its text model and head, which are another model here.

    Attributes:
        config: Of the class. What it has no part for is None in it.
        counters: Names of its tensors of integers, which training alone needs.
        depth: Layers of the encoder.
        model: The class with its weights, once they are loaded.
        layers: Its layers, then.
    """

    def __init__(self, config: PreTrainedConfig, model_class: type[PreTrainedModel], dtype: torch.dtype) -> None:
        """Builds the class on the meta device, which has shapes and no weights."""
        config.tie_word_embeddings = False  # there is no head
        self.config, self._name = config, model_class.__name__
        self._class = _without_text(model_class)
        built = build_on_meta(config, self._class, dtype, attention=None)
        tensors = built.state_dict()
        self._names, self._shapes = Names(built), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.counters = tuple(name for name, tensor in tensors.items() if not tensor.is_floating_point())
        self.depth = max(1, PausedLayers(built).depth)
        self._given: dict[str, torch.Tensor] = {}
        self.model: Any = None
        self.layers: PausedLayers

    def unsupported(self, reason: str) -> UnsupportedByTransformersError:
        """The error that the class cannot be used."""
        return UnsupportedByTransformersError(self._name, reason)

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all of its tensors, by their names in the class."""
        return {
            name: WeightSlot(shape, functools.partial(self._given.__setitem__, name), _kind(name, shape))
            for name, shape in self._shapes.items()
            if name not in self.counters
        }

    def own_name(self, name: str) -> str | None:
        """The name in the class of a tensor in a checkpoint; None if it is of another part."""
        target, pattern = self._names.target(name)
        return target if target in self._shapes and pattern is None else None

    def load(self, dtype: torch.dtype, device: torch.device) -> None:
        """Loads what the slots were given, through transformers."""
        given = self._given | {name: torch.zeros(self._shapes[name], dtype=torch.long) for name in self.counters}
        self._given = {}
        self.model = load_model(self.config, self._class, given.items(), dtype, device, attention=None).eval()
        release_files(self.model)
        self.layers = PausedLayers(self.model)

    def try_out(self, encode: Callable[[], torch.Tensor], wanted: tuple[int, int], item: str) -> None:
        """Encodes an item, which it calls `item` in an error.

        Raises:
            UnsupportedByTransformersError: What comes out are not the vectors that a prompt has places for.
        """
        try:
            found = self.layers.try_out(encode)
        except Exception as error:  # model code can raise anything if the configurations do not fit each other
            reason = f"encoding {item} raises {type(error).__name__}, {' '.join(str(error).split())[:200]}"
            raise self.unsupported(reason) from error
        if tuple(found.shape) != wanted:
            raise self.unsupported(f"{item} has {list(found.shape)} numbers instead of {list(wanted)}")


def _without_text(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class without its text model and head, which are another model here."""

    class WithoutText(model_class):  # type: ignore[misc]  # the class is known when it is loaded
        def __init__(inner, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            for name in _TEXT_PARTS:
                parent, _, attribute = name.rpartition(".")
                setattr(inner.get_submodule(parent), attribute, nn.Identity())

    # Tables of transformers have names by class, and leave out classes of other packages.
    WithoutText.__name__, WithoutText.__module__ = model_class.__name__, model_class.__module__
    WithoutText.__qualname__ = model_class.__qualname__
    return WithoutText


def _kind(name: str, shape: tuple[int, ...]) -> WeightKind:
    if not shape and name.endswith(("_min", "_max")):
        return WeightKind.BOUND
    if name.endswith("bias"):
        return WeightKind.BIAS
    return WeightKind.MATRIX if len(shape) > 1 else WeightKind.SCALE


class PartEncoder(PromptEncoder):
    """An encoder by a part of a class of transformers, run some layers at a time where the class allows that.

    Subclasses set `_part`, `_dtype`, `_device`, the size of the text model's vectors, and `slice_units` to 0.
    """

    _noun: ClassVar[str]
    _part: EncoderPart
    _dtype: torch.dtype
    _device: torch.device
    _text_size: int

    @abstractmethod
    def _sample(self) -> tuple[MediaItem, int]:
        """A small item, and the number of its bytes, for the trial."""

    @abstractmethod
    def _features(self, item: MediaItem, values: torch.Tensor) -> torch.Tensor:
        """The vectors of an item by the class, in the order of their places."""

    def slots(self) -> dict[str, WeightSlot]:
        return self._part.slots()

    def own_name(self, name: str) -> str | None:
        return self._part.own_name(name)

    @torch.inference_mode()
    def finish_loading(self) -> None:
        """Loads through transformers, and encodes a small item.

        Raises:
            UnsupportedByTransformersError: What comes out are not the vectors that a prompt has places for.
        """
        self._part.load(self._dtype, self._device)
        item, num_bytes = self._sample()
        values = self.begin(item, bytearray(num_bytes))[0]
        self._part.try_out(lambda: self._features(item, values), (item.num_vectors, self._text_size), self._noun)

    def run_layers(self, item: MediaItem, state: EncoderState, first: int, count: int) -> EncoderState:
        """The values, and the output of every layer so far."""
        values, *known = state
        return (values, *self._part.layers.run(lambda: self._features(item, values), known, first + count))

    def _layer(self, item: MediaItem, state: EncoderState, number: int) -> LayerRun:
        raise NotImplementedError("layers are those of transformers")

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """The vectors, once all layers are computed."""
        values, *known = state
        return self._part.layers.finish(lambda: self._features(item, values), known)
