"""Weights of quantized checkpoints, kept as stored in a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from llmstack_kernels.grouped_linear import PackedExperts, join_experts, pack_experts
from llmstack_kernels.linear import AnyStoredWeight
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight
from llmstack_model_runner.layers.packing import pack_parts, packing
from llmstack_model_runner.models.transformers_backend.modules import (
    PROJECTIONS,
    LinearLayer,
    are_experts,
    empty_experts,
    expert_shape,
    fill_experts,
    is_linear,
)

Weight = torch.Tensor | UnreadWeight

# Joins of checkpoint tensors that keep the matrices of the experts: one per expert, or gates before ups.
_JOINS = (("MergeModulelist",), ("MergeModulelist", "Concatenate"))


@dataclass(frozen=True, slots=True)
class _Source:
    """The target of a checkpoint's tensor: the model's tensor, and the converter that makes it, if there is one."""

    name: str
    target: str
    converter: WeightConverter | None
    pattern: str | None


@dataclass(slots=True)
class StoredLayers:
    """Which weights are packed as they are stored, and which transformers loads.

    Attributes:
        plain: Those that transformers loads, by their names in the checkpoint.
        linears: Those of linear layers, by the names of the modules.
        experts: Those of a module and projection; of each part of its outputs, the experts in order.
    """

    plain: dict[str, torch.Tensor]
    linears: dict[str, Weight] = field(default_factory=dict)
    experts: dict[tuple[str, str], list[list[Weight]]] = field(default_factory=dict)

    def class_without_weights(self, model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """The class with no weights in these layers, so that transformers neither misses nor draws them."""
        if not self.linears and not self.experts:
            return model_class

        class WithoutWeights(model_class):  # type: ignore[misc]  # the class is known when it is loaded
            def __init__(inner, config: Any, *args: Any, **options: Any) -> None:
                super().__init__(config, *args, **options)
                for name in self.linears:
                    parent, _, attribute = name.rpartition(".")
                    layer: Any = inner.get_submodule(name)
                    setattr(inner.get_submodule(parent), attribute, LinearLayer(layer))
                for name, projection in self.experts:
                    empty_experts(inner.get_submodule(name), projection)

        # Tables of transformers have names by class, and leave out classes of other packages.
        WithoutWeights.__name__, WithoutWeights.__module__ = model_class.__name__, model_class.__module__
        return WithoutWeights

    def fill(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Packs the weights one layer at a time; what has a wrong shape is not filled, and its description returned."""
        misshapen = []
        for name, weight in self.linears.items():
            layer: Any = model.get_submodule(name)
            found, wanted = _read(weight), (layer.out_features, layer.in_features)
            if tuple(found.shape) == wanted:
                bias = None if layer.bias is None else layer.bias.detach().clone()
                layer.fill(pack_parts([found.to(device)], bias, dtype), device)
            else:
                misshapen.append(f"{name}.weight {_misfit(list(found.shape), wanted)}")
        for (name, projection), parts in self.experts.items():
            module: Any = model.get_submodule(name)
            counts = sorted({len(part) for part in parts} - {module.num_experts})
            if counts:
                misshapen.append(f"{name}.{projection} of {counts[0]} experts instead of {module.num_experts}")
                continue
            try:
                packed = _pack(parts, expert_shape(module, projection), dtype, device)
                fill_experts(module, projection, packed, dtype, device)
            except _MisfitError as error:
                misshapen.append(f"{name}.{projection} of an expert {error}")
        return misshapen


def plan_stored_layers(model: PreTrainedModel, weights: Mapping[str, Weight], dtype: torch.dtype) -> StoredLayers:
    """Decides which weights stay as they are stored.

    These are the weights of linear layers that transformers does no more than rename, and those that it stacks as
    experts. What it joins or cuts in another way, and what is no linear layer, is widened to `dtype`.

    Args:
        model: The model on the meta device.
        weights: By their names in the checkpoint.
        dtype: The model's type.
    """
    planned = StoredLayers({name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)})
    stored = {name: weight for name, weight in weights.items() if isinstance(weight, UnreadWeight)}
    target_to_sources: dict[str, list[_Source]] = {}
    for source in _sources(model, weights):
        target_to_sources.setdefault(source.target, []).append(source)
    modules, tensors = dict(model.named_modules()), model.state_dict()
    tied = model.all_tied_weights_keys
    for target, sources in target_to_sources.items():
        if not any(source.name in stored for source in sources):
            continue
        module, _, tensor = target.rpartition(".")
        owner = modules.get(module)
        is_renamed = len(sources) == 1 and sources[0].pattern is None
        is_kept = target in tensors and target not in tied and target not in tied.values()
        if is_kept and is_renamed and tensor == "weight" and owner is not None and is_linear(owner):
            planned.linears[module] = stored[sources[0].name]
        elif is_kept and owner is not None and (parts := _expert_parts(owner, tensor, sources)):
            planned.experts[module, tensor] = [[weights[name] for name in part] for part in parts]
            for source in sources:
                planned.plain.pop(source.name, None)
        else:
            for source in sources:
                if source.name in stored:
                    planned.plain[source.name] = _widen(stored[source.name], dtype) if target in tensors else _NOTHING
    return planned


_NOTHING = torch.empty(0)
"""In place of a tensor that transformers does not expect, which is not read."""


class Names:
    """Names of a model's tensors by those of a checkpoint, as transformers finds out where tensors go."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model`: On any device."""
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._prefix, self._tensors = model.base_model_prefix, model.state_dict()
        self.pattern_to_converter = {
            pattern: entry for entry in self._converters for pattern in entry.source_patterns
        }  # fmt: skip

    def target(self, name: str) -> tuple[str, str | None]:
        """The model's tensor, which it may not have, and the pattern of the converter that makes it, if one does."""
        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._tensors)
        if target not in self._tensors and name in self._tensors:
            target, pattern = rename_source_key(name, [], [], self._prefix, self._tensors)
        return target, pattern


def _sources(model: PreTrainedModel, given: Mapping[str, object]) -> Iterator[_Source]:
    """In the order in which transformers joins them."""
    names = Names(model)
    for name in sorted(given, key=dot_natural_key):
        target, pattern = names.target(name)
        yield _Source(name, target, None if pattern is None else names.pattern_to_converter[pattern], pattern)


def _expert_parts(module: nn.Module, projection: str, sources: list[_Source]) -> list[list[str]]:
    """Names of tensors for each part of a projection's outputs, in the order of experts; none if others make it."""
    converter = sources[0].converter
    if projection not in PROJECTIONS or not are_experts(module) or module.is_transposed or converter is None:
        return []
    if tuple(type(operation).__name__ for operation in converter.operations) not in _JOINS:
        return []
    return [[source.name for source in sources if source.pattern == pattern] for pattern in converter.source_patterns]


def _read(weight: Weight) -> torch.Tensor | AnyStoredWeight:
    return weight.read() if isinstance(weight, UnreadWeight) else weight


def _widen(weight: UnreadWeight, dtype: torch.dtype) -> torch.Tensor:
    found = weight.read()
    return found.dequantize(dtype) if isinstance(found, AnyStoredWeight) else found


class _MisfitError(Exception):
    """A weight has another shape; the message has both."""


def _read_expert(
    parts: list[list[Weight]], number: int, wanted: tuple[int, int]
) -> list[torch.Tensor | AnyStoredWeight]:
    found = [_read(part[number]) for part in parts]
    shape = (sum(part.shape[0] for part in found), *found[0].shape[1:])
    if shape != wanted or any(part.shape[1:] != found[0].shape[1:] for part in found):
        raise _MisfitError(_misfit(" and ".join(str(list(part.shape)) for part in found), wanted))
    return found


def _misfit(found: object, wanted: tuple[int, ...]) -> str:
    return f"{found} instead of {list(wanted)}"


def _pack(
    parts: list[list[Weight]], wanted: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> PackedExperts:
    """Each expert is packed as it is stored. On a GPU, where a layer's experts are one tensor, they are widened."""
    experts = (_read_expert(parts, number, wanted) for number in range(len(parts[0])))
    if device.type != "cuda":
        return join_experts(
            [pack_parts([_to(part, dtype, device) for part in expert], None, dtype) for expert in experts]
        )
    widened = [torch.cat([_dense(part, dtype, device) for part in expert]) for expert in experts]
    return pack_experts(torch.stack(widened), None, packing().is_batch_invariant)


def _to(
    part: torch.Tensor | AnyStoredWeight, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | AnyStoredWeight:
    return part.to(device) if isinstance(part, AnyStoredWeight) else part.to(device, dtype)


def _dense(part: torch.Tensor | AnyStoredWeight, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return part.to(device).dequantize(dtype) if isinstance(part, AnyStoredWeight) else part.to(device, dtype)
