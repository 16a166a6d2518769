"""Embedding tables and the output head, which may share a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from llmstack_kernels.activation import soft_cap_
from llmstack_kernels.embedding import (
    can_look_up_blocks,
    can_look_up_packed,
    embedding,
    embedding_of_blocks,
    embedding_of_packed,
    embedding_part,
    table_of,
)
from llmstack_kernels.linear import AnyStoredWeight, BlockWeight, PackedLinear, PackedWeight
from llmstack_model_runner.layers.adaptation import AdaptedPart, ReadRows, adapted_layers
from llmstack_model_runner.layers.packing import is_packed, pack, pack_parts, packed_before, packing
from llmstack_model_runner.layers.scale import Scale
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightPart, WeightSlot, finite, skip_nothing


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
        is_head: bool = False,
    ) -> None:
        """`is_vocabulary`: ids are tokens, so that ranks share the table. `is_head`: nothing is looked up in it."""
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
        self._packed: PackedWeight | None = None  # the same in an output head
        self._blocks: BlockWeight | None = None  # the same as a GGUF file has it
        self._is_vocabulary = is_vocabulary
        self._is_needless: Callable[[], bool] = lambda: False
        self._adapted = None if is_head or num_unused_rows else adapted_layers()
        self._adapted_number = 0
        if self._adapted is not None:
            self._adapted_number = self._adapted.num_layers
            self._adapted.add_layer([self._adapted_part()])

    def _adapted_part(self) -> AdaptedPart:
        is_computed = self._sharding.is_first_stage
        return AdaptedPart(
            self._name,
            self._adapted_number,
            *self._shape,
            first_output=0,
            inputs=None,
            outputs=lambda rows: rows,
            is_loaded=lambda: is_computed,
            is_embedding=True,
            scale=self._scale,
            is_base=self.is_equal,
            read_base=self._read_base if self._can_be_replaced else None,
        )

    def _read_base(self) -> ReadRows:
        return lambda rows: self.weight[rows.start : rows.stop].float()

    @property
    def _can_be_replaced(self) -> bool:
        """Whether adapters may have another table: one rank has all of this one, on the CPU."""
        return self._part is None and self._sharding.is_whole and self._device.type == "cpu"

    def is_equal(self, table: torch.Tensor) -> bool:
        """Whether this rank has these rows of a whole table; any where it has none."""
        own = table if self._part is None else table[self._part.start : self._part.stop]
        return self._weight is None or torch.equal(own.to(self._weight), self._weight)

    @property
    def size(self) -> int:
        """The width of the vectors."""
        return self._shape[1]

    @property
    def scale(self) -> float:
        """The factor of the table's rows, in their type."""
        return self._scale

    @property
    def dtype(self) -> torch.dtype:
        """The type of the vectors."""
        return self._dtype

    @property
    def weight(self) -> torch.Tensor:
        """The table [num_rows, size], widened at each use where it is in blocks."""
        if self._blocks is not None:
            return self._blocks.dequantize(self._dtype)
        if self._weight is None:
            raise RuntimeError(f"{self._name} has no table")
        return self._weight

    @property
    def can_share(self) -> bool:
        """Whether an output head's weight may replace the table: nothing compares it with tables of adapters."""
        is_whole = self._part is None and not self._num_unused_rows
        return is_whole and self._adapted is None and can_look_up_packed()

    @property
    def _can_keep_blocks(self) -> bool:
        """Whether steps read the rows of their tokens alone, and no number of the table is too large for the type."""
        is_whole = self._part is None and not self._num_unused_rows and self._adapted is None
        is_looked_up = self._is_vocabulary and self._device.type == "cpu" and can_look_up_blocks()
        return is_whole and is_looked_up and self._dtype != torch.float16

    def share(self, packed: PackedLinear) -> None:
        """Looks up in a head's weight from now on, and drops the table, if the head has all of it as it is."""
        self._packed = table_of(packed) if self.can_share else None
        if self._packed is not None:
            self._weight = self._blocks = None

    def skip_where(self, is_needless: Callable[[], bool]) -> None:
        """The table is not read where `is_needless()` when loading begins: `share` is called then."""
        self._is_needless = is_needless

    def slots(self) -> dict[str, WeightSlot]:
        part = None if self._part is None else WeightPart(0, (self._part,))
        skip = skip_nothing if self._is_needless() else None
        slot = WeightSlot(self._shape, self._load, load_table=self._load_table, part=part, skip=skip)
        return {f"{self._name}.weight": slot}

    def __call__(
        self, ids: torch.Tensor, addend: torch.Tensor | None = None, given: StepVectors | None = None
    ) -> torch.Tensor:
        """Vectors of the ids, plus `addend` if given: [num_tokens] to [num_tokens, size].

        `given` are vectors that stand at some places in place of those, as they are: unscaled, and without `addend`.
        """
        if self._packed is not None:
            vectors = embedding_of_packed(ids, self._packed, addend, self._scale)
        elif self._blocks is not None:
            vectors = embedding_of_blocks(ids, self._blocks, self._dtype, addend, self._scale)
        elif self._part is None:
            vectors = embedding(ids, self.weight, addend, self._scale)
        else:  # each id is in one rank's part, so the sum is exact
            vectors = self._sharding.all_reduce(embedding_part(ids, self.weight, self._part.start, self._scale))
        if self._adapted is not None and self._adapted.changes(self._adapted_number):
            self._adapted.update_embedding(vectors, self._adapted_number, ids, self._shape[0])
        return vectors if given is None else vectors.index_copy_(0, given.places, given.vectors)

    def _load(self, tensor: torch.Tensor) -> None:
        # A copy, since keeping one tensor would keep the whole mapped file.
        weight = tensor[self._num_unused_rows :].to(self._device, self._dtype, copy=True)
        # A step shows what is too large for the type only if it has that token.
        self._weight = finite(weight) if self._dtype == torch.float16 != tensor.dtype else weight

    def _load_table(self, weight: AnyStoredWeight) -> None:
        """Keeps the blocks of a quantized table where rows can be looked up in them; else widens them."""
        if isinstance(weight, BlockWeight) and self._can_keep_blocks:
            self._blocks = weight.copied()
            return
        rows = slice(self._num_unused_rows, None) if self._part is None else slice(self._part.start, self._part.stop)
        table = weight.rows(rows).dequantize(self._dtype).to(self._device)
        self._weight = finite(table) if self._dtype == torch.float16 else table


class OutputHead:
    """Maps hidden states to logits. With `tied_to` it packs that table, which is then looked up in the packed weight.

    Where it cannot be, such as in quantized heads, with adapters and on GPUs, both are kept.
    With a soft cap the logits are soft_cap * tanh(logits / soft_cap). With a scale they are multiplied by it before.
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
        scale: float = 1.0,
    ) -> None:
        self._scale = None if scale == 1 else Scale(scale, device)
        self._tied_to = tied_to
        self._name = name
        self._soft_cap = soft_cap
        self._sharding = sharding()
        self._num_rows = num_rows
        self._own = self._sharding.share(num_rows)
        self._bias_part = None if self._sharding.size == 1 else WeightPart(0, (self._own,))
        self._bias = torch.empty(len(self._own), dtype=dtype, device=device) if has_bias else None
        self._table = tied_to or Embedding(
            name, num_rows, size, dtype=dtype, device=device, is_vocabulary=True, is_head=True
        )
        self._dtype, self._device = dtype, device
        self._stored: AnyStoredWeight | None = None  # the table of a quantized checkpoint
        self._packed: PackedLinear | None = None
        if tied_to is not None:
            tied_to.skip_where(lambda: self._is_known and packing().quantization is None and tied_to.can_share)
        self._row_sums: torch.Tensor | None = None  # of the table, to recognize it
        self._table_size = size
        self._adapted = adapted_layers()
        if self._adapted is not None:
            self._adapted.head = self._adapted.num_layers
            self._adapted.add_layer([self._adapted_part(self._adapted.head, size)])

    def _adapted_part(self, number: int, size: int) -> AdaptedPart:
        own = slice(self._own.start, self._own.stop)
        return AdaptedPart(
            self._name,
            number,
            size,
            self._num_rows,
            first_output=0,
            inputs=None,
            outputs=lambda rows: rows[own],
            is_loaded=lambda: self._packed is not None,
            is_base=self._is_equal,
            read_base=self._read_base if self._sharding.is_whole and self._device.type == "cpu" else None,
        )

    def _read_base(self) -> ReadRows:
        """Rows of the packed weight. Where they cannot be looked up, such as in integers, all are computed here."""
        if self._packed is None:
            raise RuntimeError("the output head has no weights yet")
        table = table_of(self._packed)
        if table is not None:
            return lambda rows: embedding_of_packed(torch.arange(rows.start, rows.stop), table).float()
        unit = torch.eye(self._table_size, dtype=self._dtype)
        columns = self._packed(unit, out_dtype=torch.float32)  # these products are exact
        whole = (columns if self._bias is None else columns - self._bias.float()).t()
        return lambda rows: whole[rows.start : rows.stop]

    def _is_equal(self, table: torch.Tensor) -> bool:
        """Whether this rank's rows equal those of a whole table. True without own rows; False for rows of integers."""
        if self._tied_to is not None:
            return self._tied_to.is_equal(table)
        own = table[self._own.start : self._own.stop].to(self._dtype)
        return self._packed is None or (
            self._row_sums is not None and torch.allclose(_row_sums(own), self._row_sums, atol=1e-6)
        )

    def slots(self) -> dict[str, WeightSlot]:
        """The table, unless it is tied, and the bias."""
        slots = {}
        if self._tied_to is None:
            slots = {
                name: replace(slot, load_stored=self._load_stored, skip=self._skip)
                for name, slot in self._table.slots().items()
            }
        if self._bias is not None:
            bias = WeightSlot((self._num_rows,), self._load_bias, WeightKind.BIAS, part=self._bias_part)
            slots[f"{self._name}.bias"] = bias
        return slots

    def finish_loading(self) -> None:
        if self._is_known:
            self._packed = packed_before(self._name, self._bias)
        elif self._stored is not None:
            self._packed = pack_parts([self._stored], self._bias, self._dtype, self._name)
        else:
            self._packed = pack(self._table.weight, self._bias, self._name)
        if self._adapted is not None and self._stored is None:
            self._row_sums = _row_sums(self._table.weight)
        self._stored = None
        if self._tied_to is not None:
            self._tied_to.share(self._packed)
        else:
            del self._table

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, size] to float32 [n, num_rows]."""
        if self._packed is None:
            raise RuntimeError("the output head has no weights yet")
        logits = self._packed(hidden, out_dtype=torch.float32)
        if self._adapted is not None and self._adapted.changes(self._adapted.head):
            self._adapted.update_head(logits, hidden)
        if self._scale is not None:
            logits = self._scale(logits)
        if self._soft_cap is not None:
            soft_cap_(logits, self._soft_cap)
        return self._sharding.all_gather(logits, self._num_rows)

    @property
    def _is_known(self) -> bool:
        """Whether the table was packed before."""
        return is_packed(self._name, (len(self._own), self._table.size))

    @property
    def _skip(self) -> Callable[[], None] | None:
        """The function to call instead of reading the table, which adapters recognize by sums of its rows."""
        return skip_nothing if self._is_known and self._adapted is None else None

    def _load_stored(self, weight: AnyStoredWeight) -> None:
        self._stored = weight.rows(slice(self._own.start, self._own.stop)).to(self._device)

    def _load_bias(self, tensor: torch.Tensor) -> None:
        if self._bias is not None:
            self._bias.copy_(tensor)


def _row_sums(table: torch.Tensor) -> torch.Tensor:
    return table.sum(1, dtype=torch.float32)
