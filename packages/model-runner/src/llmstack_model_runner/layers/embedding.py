"""Embedding tables and the output head, which may share a table."""

from __future__ import annotations

from dataclasses import replace

import torch

from llmstack_kernels.activation import soft_cap_
from llmstack_kernels.embedding import embedding, embedding_part
from llmstack_kernels.linear import PackedLinear, StoredWeight
from llmstack_model_runner.layers.packing import pack, pack_parts
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightPart, WeightSlot


class Embedding:
    """One vector per token or position, multiplied by `scale`, which is rounded to the table's type.

    The checkpoint's first `num_unused_rows` rows are skipped: id 0 is the row after them. Where several ranks share the
    vocabulary, each has a run of the rows.
    """

    def __init__(
        self,
        name: str,
        num_rows: int,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        scale: float = 1.0,
        num_unused_rows: int = 0,
        is_vocabulary: bool = False,
    ) -> None:
        """`is_vocabulary`: ids are tokens, so that ranks share the table."""
        self._sharding = sharding()
        self._part: range | None = None
        if is_vocabulary and self._sharding.size > 1:
            self._part = self._sharding.share(num_rows)
        self._name = name
        self._num_unused_rows = num_unused_rows
        self._scale = float(torch.tensor(scale, dtype=dtype))
        self._shape = (num_rows, size)
        self._dtype = dtype
        self._device = device
        self._weight: torch.Tensor | None = None  # [num_rows, size]

    @property
    def weight(self) -> torch.Tensor:
        if self._weight is None:
            raise RuntimeError(f"{self._name} has no weights yet")
        return self._weight

    def slots(self) -> dict[str, WeightSlot]:
        part = None if self._part is None else WeightPart(0, (self._part,))
        return {f"{self._name}.weight": WeightSlot(self._shape, self._load, part=part)}

    def __call__(self, ids: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
        """Vectors of the ids, plus `addend` if given: [num_tokens] to [num_tokens, size]."""
        if self._part is None:
            return embedding(ids, self.weight, addend, self._scale)
        # Each id is in one rank's part, so the sum is exact.
        return self._sharding.all_reduce(embedding_part(ids, self.weight, self._part.start, self._scale))

    def _load(self, tensor: torch.Tensor) -> None:
        # A copy, since keeping one tensor would keep the whole mapped file.
        self._weight = tensor[self._num_unused_rows :].to(self._device, self._dtype, copy=True)


class OutputHead:
    """Maps hidden states to logits. With `tied_to` it packs a copy of that table.

    With a soft cap the logits are soft_cap * tanh(logits / soft_cap).
    """

    def __init__(
        self,
        num_rows: int,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: Embedding | None = None,
        name: str = "lm_head",
        has_bias: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        self._tied_to = tied_to
        self._name = name
        self._soft_cap = soft_cap
        self._sharding = sharding()
        self._num_rows = num_rows
        self._own = self._sharding.share(num_rows)
        self._bias_part = None if self._sharding.size == 1 else WeightPart(0, (self._own,))
        self._bias = torch.empty(len(self._own), dtype=dtype, device=device) if has_bias else None
        self._table = tied_to or Embedding(name, num_rows, size, dtype=dtype, device=device, is_vocabulary=True)
        self._dtype, self._device = dtype, device
        self._stored: StoredWeight | None = None  # the table of a quantized checkpoint
        self._packed: PackedLinear | None = None

    def slots(self) -> dict[str, WeightSlot]:
        """The table, unless it is tied, and the bias."""
        slots = {}
        if self._tied_to is None:
            slots = {name: replace(slot, load_stored=self._load_stored) for name, slot in self._table.slots().items()}
        if self._bias is not None:
            bias = WeightSlot((self._num_rows,), self._load_bias, WeightKind.BIAS, part=self._bias_part)
            slots[f"{self._name}.bias"] = bias
        return slots

    def finish_loading(self) -> None:
        if self._stored is not None:
            self._packed = pack_parts([self._stored], self._bias, self._dtype)
            self._stored = None
        else:
            self._packed = pack(self._table.weight, self._bias)
        if self._tied_to is None:
            del self._table

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, size] to float32 [n, num_rows]."""
        if self._packed is None:
            raise RuntimeError("the output head has no weights yet")
        logits = self._packed(hidden, out_dtype=torch.float32)
        if self._soft_cap is not None:
            soft_cap_(logits, self._soft_cap)
        return self._sharding.all_gather(logits, self._num_rows)

    def _load_stored(self, weight: StoredWeight) -> None:
        self._stored = weight.rows(slice(self._own.start, self._own.stop)).to(self._device)

    def _load_bias(self, tensor: torch.Tensor) -> None:
        if self._bias is not None:
            self._bias.copy_(tensor)
