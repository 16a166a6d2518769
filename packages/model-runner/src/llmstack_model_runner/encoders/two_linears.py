"""A projector of two linear layers, with an activation between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llmstack_model_runner.layers import Linear, WeightSlot, collect_slots
from llmstack_model_runner.layers.linear import linear_activation


class TwoLinears:
    """`multi_modal_projector.linear_1` and `linear_2`, from `in_features` to the text model's size.

    They keep their precision where other layers are rounded.
    """

    def __init__(
        self, whole: Mapping[str, Any], in_features: int, text_size: int, dtype: torch.dtype, device: torch.device,
        *, has_bias: bool,
    ) -> None:  # fmt: skip
        """`whole`: The configuration of the whole model, which names the activation."""
        self._first, self._second = (
            Linear(
                inputs, {f"multi_modal_projector.{name}": text_size}, has_bias=has_bias, dtype=dtype, device=device,
                keeps_precision=True,
            )
            for inputs, name in ((in_features, "linear_1"), (text_size, "linear_2"))
        )  # fmt: skip
        self._activation = linear_activation(str(whole.get("projector_hidden_act") or "gelu"))

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of both layers."""
        return collect_slots([self._first, self._second])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [n, in_features] to [n, text_size]
        return self._second(self._first(x, self._activation))
