"""Tables of vectors, and the output head that may share one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llmstack_kernels.linear import PackedLinear, pack_linear
from llmstack_model_runner.layers.weight_slot import WeightSlot


class Embedding:
    """One vector per token or position."""

    def __init__(self, name: str, num_rows: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self._shape = (num_rows, size)
        self._dtype = dtype
        self._device = device
        self._weight: torch.Tensor | None = None  # [num_rows, size]

    @property
    def weight(self) -> torch.Tensor:
        """The table."""
        if self._weight is None:
            raise RuntimeError(f"{self._name} has no weights yet")
        return self._weight

    def slots(self) -> dict[str, WeightSlot]:
        """The table."""
        return {f"{self._name}.weight": WeightSlot(self._shape, self._load)}

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] to [num_tokens, size]."""
        return F.embedding(ids, self.weight)

    def _load(self, tensor: torch.Tensor) -> None:
        self._weight = tensor.to(self._device, self._dtype)


class OutputHead:
    """Hidden states to logits; shares the table of `tied_to` if given, packing a copy of its own."""

    def __init__(
        self,
        num_rows: int,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: Embedding | None = None,
        name: str = "lm_head",
    ) -> None:
        self._tied_to = tied_to
        self._table = tied_to or Embedding(name, num_rows, size, dtype=dtype, device=device)
        self._packed: PackedLinear | None = None

    def slots(self) -> dict[str, WeightSlot]:
        """The table, unless it is shared."""
        return {} if self._tied_to is not None else self._table.slots()

    def finish_loading(self) -> None:
        """Pack the table."""
        self._packed = pack_linear(self._table.weight)
        if self._tied_to is None:
            del self._table

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, size] to float32 [n, num_rows]."""
        if self._packed is None:
            raise RuntimeError("the output head has no weights yet")
        return self._packed(hidden).float()
