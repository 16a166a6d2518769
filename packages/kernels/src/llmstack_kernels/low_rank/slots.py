"""Factors of the adapters that a step can use, and the rows that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kernels.low_rank.row_order import RowOrder
from llmstack_kernels.native.huge_pages import empty_in_huge_pages

MAX_PARTS = 4
"""Most pairs of factors of one layer, such as those of queries, keys and values."""
PANEL_SIZE = 32
"""Outputs of a panel of a second factor. `native.cpp` has the same number."""
_WORDS_PER_PART = 5
_ALIGNMENT = 64  # a line of the cache


class LowRankFactors(NamedTuple):
    """A pair of factors: it adds (x Aᵀ) B to some of a layer's outputs.

    Attributes:
        a: [rank, in_features], contiguous.
        b: [rank, num_outputs], contiguous, in the type of `a`; a scale of the update is in it.
        first_output: The output that the first column of `b` belongs to.
    """

    a: torch.Tensor
    b: torch.Tensor
    first_output: int


class _StoredFactors(NamedTuple):
    """A pair of factors as kernels read it.

    Attributes:
        a: [rank, in_features].
        panels: The second factor by groups of its outputs: [num_panels, rank, PANEL_SIZE], zeros at the end.
        first_output: The output that the first column of the second factor belongs to.
        num_outputs: Columns of the second factor.
    """

    a: torch.Tensor
    panels: torch.Tensor
    first_output: int
    num_outputs: int

    @classmethod
    def store(cls, factors: LowRankFactors, place: Callable[[torch.Tensor], torch.Tensor]) -> _StoredFactors:
        """`place`: A contiguous copy in the memory that kernels read."""
        a, b, first_output = factors
        if a.shape[0] != b.shape[0] or a.dtype != b.dtype or not (a.is_contiguous() and b.is_contiguous()):
            raise ValueError(f"factors of shapes {tuple(a.shape)} and {tuple(b.shape)} are no pair.")
        rank, num_outputs = b.shape
        # A thread reads some columns of all ranks: in `b` they lie kilobytes apart, in a panel side by side.
        padded = torch.nn.functional.pad(b, (0, -num_outputs % PANEL_SIZE))
        panels = padded.view(rank, -1, PANEL_SIZE).transpose(0, 1)
        return cls(place(a), place(panels), first_output, num_outputs)

    def factors(self) -> LowRankFactors:
        b = self.panels.transpose(0, 1).reshape(self.a.shape[0], -1)[:, : self.num_outputs]
        return LowRankFactors(self.a, b, self.first_output)


class _Memory:
    """Memory of an adapter on a CPU: one piece in huge pages, its factors in the order in which steps read them."""

    def __init__(self, layers: Sequence[Sequence[LowRankFactors]]) -> None:
        factors = [factor for parts in layers for a, b, _ in parts for factor in (a, b)]
        # Each is padded to whole panels and lines of the cache.
        sizes = (factor.nbytes + (PANEL_SIZE - 1) * len(factor) * factor.itemsize + _ALIGNMENT for factor in factors)
        self._memory = empty_in_huge_pages(sum(sizes), torch.uint8)
        self._used = 0

    def place(self, factor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy behind those before it."""
        size = factor.numel() * factor.itemsize
        placed = self._memory[self._used : self._used + size].view(factor.dtype).view(factor.shape)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return placed.copy_(factor)


class LowRankAdapter:
    """An adapter: the pairs of factors of each layer of a model, which it owns."""

    def __init__(self, layers: Sequence[Sequence[LowRankFactors]], device: torch.device | None = None) -> None:
        """Takes at most `MAX_PARTS` pairs for a layer, none for a layer that is left as it is.

        `device`: Where the kernels run; the CPU by default.
        """
        device = device or torch.device("cpu")
        store = _Memory(layers).place if device.type == "cpu" else lambda factor: factor.contiguous().to(device)
        self._layers = tuple(tuple(_StoredFactors.store(pair, store) for pair in parts) for parts in layers)
        words = np.zeros((len(layers), MAX_PARTS, _WORDS_PER_PART), dtype=np.int64)
        for number, parts in enumerate(self._layers):
            if len(parts) > MAX_PARTS:
                raise ValueError(f"a layer has {len(parts)} pairs of factors; at most {MAX_PARTS} are possible.")
            for place, (a, panels, first, num_outputs) in enumerate(parts):
                words[number, place] = a.data_ptr(), panels.data_ptr(), a.shape[0], first, num_outputs
        self.words = torch.from_numpy(words).to(device)

    def factors(self, layer: int) -> list[LowRankFactors]:
        """The pairs of a layer; the second factors are copies."""
        return [stored.factors() for stored in self._layers[layer]]

    def changes(self, layer: int) -> bool:
        """Whether it has factors for a layer."""
        return bool(self._layers[layer])

    @property
    def num_bytes(self) -> int:
        """Memory of all factors."""
        return sum(stored.a.nbytes + stored.panels.nbytes for parts in self._layers for stored in parts)

    @property
    def max_rank(self) -> int:
        """The largest rank of its factors."""
        return max(self.layer_ranks, default=0)

    @property
    def layer_ranks(self) -> list[int]:
        """The largest rank of each layer's factors; 0 for a layer that is left as it is."""
        return [max((stored.a.shape[0] for stored in parts), default=0) for parts in self._layers]


class LowRankSlots(RowOrder):
    """The adapters of a step by slot, and its rows in the order of their slots, in memory that stays where it is.

    Attributes:
        adapters: By slot; None for a free one.
        max_rank: Most numbers between the two factors.
        larger_ranks: The same of layers that may have more.
        words: Addresses and sizes of all factors: [num_slots, num_layers, words of a layer].
        num_fixed_rows: Rows of a step that is captured, whose slots are not known yet; 0 for steps in order.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        max_num_rows: int,
        max_rank: int,
        device: torch.device,
        larger_ranks: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(max_num_rows, device)
        self.adapters: list[LowRankAdapter | None] = [None] * num_slots
        self.max_rank = max_rank
        self.num_fixed_rows = 0
        self.larger_ranks = dict(larger_ranks or {})
        self.words = torch.zeros((num_slots, num_layers, MAX_PARTS * _WORDS_PER_PART), dtype=torch.int64, device=device)

    @property
    def num_launched_tiles(self) -> int:
        """The number of tiles for any order; fixed rows make one per `num_tile_rows` at most, and one more per slot."""
        most = len(self.adapters) + self.num_fixed_rows // self.num_tile_rows
        return min(self.num_fixed_rows, most) or len(self.host_tiles)

    def max_rank_of(self, layer: int) -> int:
        """Most numbers between the two factors of a layer."""
        return max(self.max_rank, self.larger_ranks.get(layer, 0))

    def words_of(self, layer: int) -> torch.Tensor:
        """Addresses and sizes of a layer's factors: [num_slots, words of a layer]."""
        return self.words[:, layer]

    def factors(self, slot: int, layer: int) -> list[LowRankFactors]:
        """The pairs of a layer in a slot; the second factors are copies."""
        adapter = self.adapters[slot]
        return [] if adapter is None else adapter.factors(layer)

    def put(self, slot: int, adapter: LowRankAdapter | None) -> None:
        """Places an adapter; no step that uses the slot may be under way."""
        for layer, rank in enumerate(() if adapter is None else adapter.layer_ranks):
            if rank > self.max_rank_of(layer):
                raise ValueError(f"an adapter of rank {rank} does not fit slots of rank {self.max_rank_of(layer)}.")
        self.adapters[slot] = adapter
        if adapter is None:
            self.words[slot].zero_()
        else:
            self.words[slot].copy_(adapter.words.view(self.words.shape[1:]))


class ExpertRows(RowOrder):
    """Rows of a layer of experts, each with a slot and an expert, in the order of both.

    A product of the experts is a run of layers of the adapters, one for each expert. The layers of a slot lie side by
    side, so a slot and an expert are one number here, which takes the place of a slot.

    Attributes:
        max_rank: Most numbers between the two factors.
    """

    def __init__(
        self, slots: LowRankSlots, row_slots: npt.NDArray[np.integer[Any]], experts: npt.NDArray[np.integer[Any]]
    ) -> None:
        """`row_slots`: The slot of each row, -1 for none. `experts`: The expert of each row."""
        super().__init__(len(row_slots), slots.rows.device)
        self.max_rank = slots.max_rank
        self._slots = slots
        self._num_layers = slots.words.shape[1]
        self.group(np.where(row_slots < 0, -1, row_slots * self._num_layers + experts))

    def words_of(self, layer: int) -> torch.Tensor:
        """Addresses and sizes of the factors from the first expert's layer on: a row for each number."""
        return self._slots.words.view(-1, self._slots.words.shape[2])[layer:]

    def max_rank_of(self, layer: int) -> int:
        """Most numbers between the two factors of any expert."""
        return self.max_rank

    def factors(self, slot: int, layer: int) -> list[LowRankFactors]:
        """The pairs of a number, if the first expert is that layer."""
        number, expert = divmod(slot, self._num_layers)
        return self._slots.factors(number, layer + expert)
