"""Layers of transformers' models whose weights are packed for llmstack's products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.pytorch_utils import Conv1D

from llmstack_kernels.grouped_linear import PackedExperts, group_rows, grouped_linear, pack_experts, sum_choices
from llmstack_kernels.linear import PackedLinear
from llmstack_model_runner.layers.adaptation import AdaptedLayers, AdaptedPart
from llmstack_model_runner.layers.packing import pack, packing

PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters of a layer of experts, each [num_experts, out_features, in_features]."""

# What code may ask of a weight without its numbers.
_ATTRIBUTES = frozenset({
    "device", "dim", "dtype", "element_size", "grad", "is_cuda", "is_floating_point", "is_meta", "is_quantized",
    "itemsize", "layout", "ndim", "ndimension", "numel", "requires_grad", "shape", "size",
})  # fmt: skip
_PACKED_ATTRIBUTE = "llmstack_packed"
_SHAPES_ATTRIBUTE = "llmstack_expert_shapes"


def is_linear(module: object) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether a module is a linear layer and nothing else; subclasses may compute something else."""
    return type(module) is nn.Linear or type(module) is Conv1D


def are_experts(module: nn.Module) -> bool:
    """Whether a module is a layer of experts whose products transformers lets others compute."""
    return hasattr(module, "_apply_gate") and hasattr(module, "has_post_expert_norm") and hasattr(module, "num_experts")


def pack_modules(model: nn.Module) -> None:
    """Replaces the weights of linear layers and experts by packed ones, so that at most one layer has two copies."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_linear(child):
                layer = LinearLayer(child)
                layer.fill(_pack_linear(child), child.weight.device)
                setattr(parent, name, layer)
    for module in model.modules():
        if are_experts(module):
            _pack_whole_experts(module)


def _pack_linear(layer: nn.Linear | Conv1D) -> PackedLinear:
    weight, bias = layer.weight.detach(), layer.bias
    # A copy, since the packed layer would keep the tensor and with it the mapped file.
    return pack(weight.t() if isinstance(layer, Conv1D) else weight, None if bias is None else bias.detach().clone())


def _pack_whole_experts(module: Any) -> None:
    """Packs the projections that are parameters; those of a quantized checkpoint are packed already."""
    for name in PROJECTIONS:
        weights = module._parameters.get(name)
        if weights is not None and weights.ndim == 3:
            chosen = packing()
            matrices = weights.detach().transpose(1, 2) if module.is_transposed else weights.detach()
            packed = pack_experts(matrices.contiguous(), chosen.quantization, chosen.is_batch_invariant)
            fill_experts(module, name, packed, weights.dtype, weights.device)


class LinearLayer(nn.Module):
    """A linear layer whose weight only the packed product can read.

    `weight` has the layer's shape and type, for code that reads them. For code that computes with its numbers, as some
    routers do, they are computed once; of a layer with a bias they are NaN, which the probe detects.
    """

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        """The layer has no weight until `fill`, and the bias of `layer`."""
        super().__init__()
        self.bias = layer.bias
        self._stored_shape: tuple[int, ...] = tuple(layer.weight.shape)
        self._dtype: torch.dtype = layer.weight.dtype
        self.is_transposed = isinstance(layer, Conv1D)
        shape = self._stored_shape[::-1] if self.is_transposed else self._stored_shape
        self.out_features, self.in_features = shape
        self._adapted: AdaptedLayers | None = None
        self._number = 0
        self._is_hf_initialized = True  # nothing is missing that transformers could draw at random

    def fill(self, packed: PackedLinear, device: torch.device) -> None:
        """Gives the layer its weight, which is on a device."""
        self.weight = unreadable(self._stored_shape, self._dtype, device)
        if self.bias is None:
            self.weight = self.weight.as_subclass(_PackedWeight)
            self.weight.unpack = cache(partial(_unpack, self))  # type: ignore[attr-defined]
        self._packed = packed

    def adapt(self, name: str, layers: AdaptedLayers) -> None:
        """Registers the layer with those that adapters can change."""
        self._adapted, self._number = layers, layers.num_layers
        sizes = (self.in_features, self.out_features, 0)
        layers.add_layer([AdaptedPart(name, self._number, *sizes, None, lambda rows: rows, lambda: True)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._adapted is None or not self._adapted.changes(self._number):
            return self._packed(x)
        rows = x.reshape(-1, self.in_features)
        return self._adapted.compute(self._packed, self._number, rows, "none", None).view(*x.shape[:-1], -1)


class _PackedWeight(torch.Tensor):
    """A weight whose numbers are computed when an operation needs them; its shape and type are known."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if name not in _ATTRIBUTES:
            args, kwargs = tree_map_only(cls, lambda weight: weight.unpack(), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _unpack(layer: LinearLayer) -> torch.Tensor:
    """The weight as the layer had it: products with ones and zeros have its very numbers."""
    columns: torch.Tensor = layer(torch.eye(layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device))
    return columns if layer.is_transposed else columns.t()


def unreadable(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that takes the memory of one number, which is NaN."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(*shape)


def empty_experts(module: Any, name: str) -> None:
    """Removes a projection before the model's weights are loaded; `fill_experts` gives it back."""
    parameter = module._parameters.pop(name)
    module.__dict__.setdefault(_SHAPES_ATTRIBUTE, {})[name] = tuple(parameter.shape[1:])
    module._is_hf_initialized = True  # nothing is missing that transformers could draw at random


def expert_shape(module: nn.Module, name: str) -> tuple[int, int]:
    """Outputs and inputs of an expert in a projection that `empty_experts` removed."""
    shape: tuple[int, int] = module.__dict__[_SHAPES_ATTRIBUTE][name]
    return shape


def fill_experts(module: nn.Module, name: str, packed: PackedExperts, dtype: torch.dtype, device: torch.device) -> None:
    """Gives a layer of experts the packed weights of a projection, and llmstack's products."""
    sizes = (packed.num_experts, packed.out_features, packed.in_features)
    module._parameters.pop(name, None)
    setattr(module, name, unreadable(sizes, dtype, device))
    module.__dict__.setdefault(_PACKED_ATTRIBUTE, {})[name] = packed
    module.__dict__["forward"] = partial(_compute_experts, module)


def _compute_experts(
    module: Any,  # a layer of experts
    hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
    top_k_index: torch.Tensor,  # [num_tokens, num_choices]
    top_k_weights: torch.Tensor,  # [num_tokens, num_choices]
) -> torch.Tensor:
    """The sum of each token's experts by their weights, as the functions of transformers' `ExpertsInterface` compute.

    An index past the experts is a choice of none.
    """
    packed: dict[str, PackedExperts] = module.__dict__[_PACKED_ATTRIBUTE]
    shares = top_k_weights.float().masked_fill(top_k_index >= module.num_experts, 0.0)
    places = top_k_index.clamp(max=module.num_experts - 1)
    groups, choices = group_rows(places, module.num_experts), places.reshape(-1)

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        rows = grouped_linear(x, packed[name], groups)
        return rows + getattr(module, f"{name}_bias")[choices] if module.has_bias else rows

    if module.has_gate:
        inner = module._apply_gate(product("gate_up_proj", hidden_states))
    else:
        inner = module.act_fn(product("up_proj", hidden_states))
    rows = product("down_proj", inner)
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)
    return sum_choices(rows, shares)
