"""Normalisation layers: RMS norm and layer norm."""

from __future__ import annotations

from functools import partial

import torch

from llmstack_kernels.layer_norm import layer_norm
from llmstack_kernels.rms_norm import fused_add_rms_norm, rms_norm
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightSlot


class RMSNorm:
    """Root-mean-square normalisation of the last dimension.

    With `is_offset` the checkpoint stores the scale minus 1, as Gemma's do, and the scale is kept in float32. Without
    `has_scale` it stores nothing, and the scale is 1.

    Attributes:
        weight: The scale.
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_offset: bool = False,
        has_scale: bool = True,
    ) -> None:
        self._name = name
        self.eps = eps
        self._is_offset, self._has_scale = is_offset, has_scale
        self.weight = torch.ones(size, dtype=torch.float32 if is_offset else dtype, device=device)

    def slots(self) -> dict[str, WeightSlot]:
        """Slot of the scale, or of the scale minus 1."""
        if not self._has_scale:
            return {}
        kind = WeightKind.BIAS if self._is_offset else WeightKind.SCALE
        return {f"{self._name}.weight": WeightSlot(tuple(self.weight.shape), self._load, kind)}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised sum of `x` and `residual`, and the sum itself; without a residual the sum is `x`."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return fused_add_rms_norm(x, residual, self.weight, self.eps)

    def _load(self, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor)
        if self._is_offset:
            self.weight.add_(1)


class SharedRMSNorm(RMSNorm):
    """Root-mean-square normalisation of numbers that ranks share out: each needs those of all, and keeps its own."""

    def __init__(
        self, name: str, size: int, own: range, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`own`: This rank's of `size` numbers.

        Raises:
            ValueError: Several ranks have the same numbers.
        """
        super().__init__(name, size, eps, dtype=dtype, device=device)
        self._sharding, self._own, self._size = sharding(), own, size
        if len(own) * self._sharding.size != size:
            raise ValueError(
                f"tensor_parallel_size is {self._sharding.size}, which does not divide the heads that {name} normalises"
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, own] to the same; tokens may be slices of a wider projection."""
        if self._sharding.size == 1:
            return super().__call__(x.unsqueeze(1)).squeeze(1)  # kernels copy rows that are apart, but no heads
        normed = super().__call__(self._sharding.all_gather(x.contiguous(), self._size))
        return normed[:, self._own.start : self._own.stop].contiguous()


class LayerNorm:
    """Layer normalisation of the last dimension, with a shift."""

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        order: torch.Tensor | None = None,
    ) -> None:
        """`order`: The checkpoint's place of each number; None where they are in order."""
        self._name = name
        self._eps = eps
        self._order = order
        self._weight = torch.empty(size, dtype=dtype, device=device)
        self._bias = torch.empty(size, dtype=dtype, device=device)

    def slots(self) -> dict[str, WeightSlot]:
        shape = tuple(self._weight.shape)
        return {
            f"{self._name}.weight": WeightSlot(shape, partial(self._load, self._weight), WeightKind.SCALE),
            f"{self._name}.bias": WeightSlot(shape, partial(self._load, self._bias), WeightKind.BIAS),
        }

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self._weight, self._bias, self._eps)

    def _load(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        target.copy_(tensor if self._order is None else tensor[self._order])
