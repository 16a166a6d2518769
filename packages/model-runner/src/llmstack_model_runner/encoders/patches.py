"""Patches of pictures, whose embedding is a linear layer."""

from __future__ import annotations

from dataclasses import replace

import torch

from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.weight_slot import WeightSlot


class PatchEmbedding:
    """A convolution as one product over windows, a row each: patches of a picture, which do not overlap, or frames."""

    def __init__(
        self, name: str, window: tuple[int, ...], size: int, *, has_bias: bool, dtype: torch.dtype,
        device: torch.device, has_channels_last: bool = False,
    ) -> None:  # fmt: skip
        """`window`: Channels, then the sides of a patch or the frames of a window.

        `has_channels_last`: Whether a row has all channels of one frame, then those of the next.

        The checkpoint's weight has the shape [size, *window].
        """
        self._name, self._shape, self._has_channels_last = name, (size, *window), has_channels_last
        num_features = torch.Size(window).numel()
        self._linear = Linear(
            num_features, {name: size}, has_bias=has_bias, dtype=dtype, device=device, keeps_precision=True
        )

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of the weight, in the shape of a convolution, and of the bias."""
        slots = self._linear.slots()
        flat = slots[f"{self._name}.weight"]

        def load(tensor: torch.Tensor) -> None:
            flat.load((tensor.movedim(1, -1) if self._has_channels_last else tensor).reshape(flat.shape))

        weight = replace(flat, shape=self._shape, load=load, load_stored=None, stored_shape=None)
        return {**slots, f"{self._name}.weight": weight}

    def __call__(
        self, patches: torch.Tensor, activation: str = "none", residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[num_patches, features of one] to [num_patches, size]; the rest as for `Linear`."""
        return self._linear(patches, activation, residual)


def unfold(values: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Patches of crops [num_crops, channels, height, width], row by row: [num_patches, channels * patch_size ** 2].

    What is left of a side that is no multiple is cut off, as a convolution does.
    """
    num_crops, channels, height, width = values.shape
    rows, columns = height // patch_size, width // patch_size
    whole = values[:, :, : rows * patch_size, : columns * patch_size]
    parts = whole.reshape(num_crops, channels, rows, patch_size, columns, patch_size)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels * patch_size**2)
