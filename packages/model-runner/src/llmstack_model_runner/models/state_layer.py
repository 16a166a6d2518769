"""Layers with a state in place of keys and values, and models that have some."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch

from llmstack_kernels.linear import AnyStoredWeight
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight
from llmstack_model_runner.layers import RotaryEmbedding
from llmstack_model_runner.layers.mixer import Mixer, MixerSettings
from llmstack_model_runner.layers.weight_slot import AnyWeight
from llmstack_model_runner.models.kv_spec import LayerKVSpec
from llmstack_model_runner.models.llama import Llama
from llmstack_model_runner.models.llama_layer import LlamaLayerSettings

_CONVOLUTION = re.compile(r"(.*\.)([qkv])_conv1d\.weight")

AnySettings = TypeVar("AnySettings", bound=LlamaLayerSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayerSettings(LlamaLayerSettings):
    """Sizes of a layer with a state; what `LlamaLayerSettings` says of attention has no effect."""

    mixer: MixerSettings

    def kv_spec(self, dtype: torch.dtype) -> LayerKVSpec:
        """The state, of this rank's part."""
        return LayerKVSpec(kind="state", states=self.mixer.states(dtype))

    def make_mixer(
        self, prefix: str, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> Mixer:
        """The mixer without weights."""
        return self.mixer.make(prefix, self.hidden_size, self.eps, dtype, device)


class HybridModel(Llama):
    """A model of the Llama family some of whose layers have a state."""

    can_omit_tokens: ClassVar[bool] = False


class SplitConvolutions(HybridModel):
    """A model whose checkpoints have a convolution each for queries, keys and values; transformers has one for all."""

    def load_weights(self, weights: Iterable[tuple[str, AnyWeight]]) -> None:
        """Loads all tensors; the taps of three convolutions as those of one."""
        super().load_weights(_join_convolutions(weights))


def _join_convolutions(weights: Iterable[tuple[str, AnyWeight]]) -> Iterator[tuple[str, AnyWeight]]:
    """The tensors; the three convolutions of a layer are joined to one tensor, after the last of them was read."""
    prefix_to_taps: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in weights:
        found = _CONVOLUTION.fullmatch(name)
        if found is None:
            yield name, weight
            continue
        prefix, letter = found.groups()
        taps = prefix_to_taps.setdefault(prefix, {})
        taps[letter] = _read_taps(name, weight)
        if len(taps) == len("qkv"):
            yield f"{prefix}conv1d.weight", torch.cat([taps[one] for one in "qkv"])


def _read_taps(name: str, weight: AnyWeight) -> torch.Tensor:
    read = weight.read() if isinstance(weight, UnreadWeight) else weight
    if isinstance(read, AnyStoredWeight):
        raise ValueError(f"{name[:128]} is quantized, and only supported in full precision.")
    return read if isinstance(read, torch.Tensor) else read.read(None)


def mix_layers(
    attention: list[LlamaLayerSettings], mixer: MixerSettings, have_attention: list[bool]
) -> list[LlamaLayerSettings]:
    """The layers, of which those without attention have the mixer in its place."""
    return [
        layer if has_attention else mix_layer(StateLayerSettings, layer, mixer=mixer)
        for layer, has_attention in zip(attention, have_attention, strict=True)
    ]


def mix_layer(settings_class: type[AnySettings], layer: LlamaLayerSettings, **own: Any) -> AnySettings:
    """The settings of a layer as another class of settings, with the further fields in `own`."""
    return settings_class(**{field.name: getattr(layer, field.name) for field in fields(LlamaLayerSettings)}, **own)


def read_layer_kinds(kinds: object, num_layers: int, *others: str) -> list[bool]:
    """Which layers have attention, by their kinds: `full_attention`, or one of `others`.

    Raises:
        ValueError: The kinds do not name each layer.
    """
    known = {"full_attention", *others}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= known:
        raise ValueError(f"config.json: layer_types must name each layer {' or '.join(sorted(known))}.")
    return [kind == "full_attention" for kind in kinds]
