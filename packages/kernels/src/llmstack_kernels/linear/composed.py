"""Layers composed of packed ones: outputs one after another, inputs permuted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.linear.packed_weight import SizedLinear
from llmstack_kernels.linear.reference import finish

if TYPE_CHECKING:
    from llmstack_kernels.linear import PackedLinear


class ConcatenatedLinear(SizedLinear):
    """For parts that are stored differently, such as in checkpoints of mixed precision."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        super().__init__((sum(part.out_features for part in parts), parts[0].in_features))
        self._parts = parts

    @property
    def parts(self) -> Sequence[PackedLinear]:
        """The layers whose outputs follow one another."""
        return self._parts

    def __call__(
        self,
        x: torch.Tensor,
        activation: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual."""
        outs = [part(x, out_dtype=out_dtype) for part in self._parts]
        module = implementation("linear", x.device.type)
        out = module.concatenate(outs) if hasattr(module, "concatenate") else torch.cat(outs, -1)
        return finish(out, activation, residual, out_dtype)


class OrderedLinear(SizedLinear):
    """A layer whose weight has its inputs in a different order; PyTorch permutes them."""

    __slots__ = ("_inner", "_order")

    def __init__(self, inner: PackedLinear, order: torch.Tensor) -> None:
        """`order` is the input of each column of the weight: [in_features]."""
        super().__init__((inner.out_features, inner.in_features))
        self._inner = inner
        self._order = order

    def __call__(
        self,
        x: torch.Tensor,
        activation: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual."""
        return self._inner(x.index_select(-1, self._order), activation, residual, out_dtype)


def concatenate_linears(parts: Sequence[PackedLinear]) -> PackedLinear:
    """One layer with the outputs of all parts, which have equally many inputs."""
    return parts[0] if len(parts) == 1 else ConcatenatedLinear(parts)
