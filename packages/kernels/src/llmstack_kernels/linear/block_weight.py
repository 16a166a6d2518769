"""Weights of GGUF files as they lie there: blocks of few bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.linear.stored_weight import StoredWeight
from llmstack_kernels.native.huge_pages import advise_huge_pages, empty_in_huge_pages

__all__ = ["BLOCK_TYPES", "BlockType", "BlockWeight", "join_blocks"]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks.

    Attributes:
        num_inputs: Inputs of a block.
        num_bytes: Bytes of a block.
        scales: Where its scales of float16 begin.
        segment: Inputs that are rounded together; a group of weights has as many.
    """

    num_inputs: int
    num_bytes: int
    scales: tuple[int, ...]
    segment: int = 32


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 18, (0,)),
    "Q4_1": BlockType(32, 20, (0, 2)),
    "Q5_0": BlockType(32, 22, (0,)),
    "Q5_1": BlockType(32, 24, (0, 2)),
    "Q8_0": BlockType(32, 34, (0,)),
    "Q4_K": BlockType(256, 144, (0, 2)),
    "Q5_K": BlockType(256, 176, (0, 2)),
    "Q6_K": BlockType(256, 210, (208,), 16),
}
"""Those that layers with rounded inputs are packed from, by ggml's names."""

_NUMBERS_AT_ONCE = 1 << 20
"""Numbers that are widened together: 4 MiB in float32, which stay in caches, beside a table that may have billions."""
_INFINITE = 0x7C00  # exponent of a float16 that is infinite or NaN


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [out_features, in_features] of one or several tensors of a file.

    Attributes:
        block_type: One of `BLOCK_TYPES`.
        parts: uint8 [rows, blocks of a row, bytes of a block] of each tensor, whose rows follow one another.
        read: Makes the weight of numbers that blocks stand for.
        outputs: int64 [out_features], the row of each output; None for all rows in order.
    """

    block_type: str
    parts: tuple[torch.Tensor, ...]
    read: Callable[[torch.Tensor], StoredWeight]
    outputs: torch.Tensor | None = None

    def check(self) -> None:
        """Raises ValueError if a scale is NaN or infinite, which kernels do not look for."""
        module = implementation("linear", "cpu")
        is_finite = module.blocks_are_finite if hasattr(module, "blocks_are_finite") else _are_finite
        if not is_finite(self):
            raise ValueError("a scale is NaN or infinite.")

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight: [out_features, in_features]."""
        num_rows = sum(part.shape[0] for part in self.parts) if self.outputs is None else len(self.outputs)
        return torch.Size((num_rows, self.parts[0].shape[1] * BLOCK_TYPES[self.block_type].num_inputs))

    @property
    def ndim(self) -> int:
        """A weight is a matrix, as tensors of weights are."""
        return 2

    def rows(self, index: torch.Tensor | slice) -> BlockWeight:
        """The outputs that `index` selects."""
        return replace(self, outputs=self._all_outputs()[index])

    def columns(self, inputs: range) -> BlockWeight | StoredWeight | None:
        """The inputs of a run; None where no group size fits."""
        size = BLOCK_TYPES[self.block_type].num_inputs
        if inputs.start % size or inputs.stop % size:
            return self.stored().columns(inputs)
        blocks = slice(inputs.start // size, inputs.stop // size)
        return replace(self, parts=tuple(part[:, blocks] for part in self.parts))

    def to(self, device: torch.device) -> BlockWeight | StoredWeight:
        """This weight on another device; on a GPU its blocks become stored numbers and scales."""
        return self if device.type == "cpu" else self.stored().to(device)

    def stored(self) -> StoredWeight:
        """The weight of numbers."""
        return self.read(self._rows())

    def copied(self) -> BlockWeight:
        """The same weight in memory of its own: one part, whose rows are in order."""
        rows = self._rows()
        own = empty_in_huge_pages(rows.numel(), torch.uint8).view(rows.shape).copy_(rows)
        return replace(self, parts=(own,), outputs=None)

    def _rows(self) -> torch.Tensor:
        blocks = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        return blocks if self.outputs is None else blocks[self.outputs]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the blocks represent, rounded once from float32: [out_features, in_features]."""
        num_rows, num_inputs = self.shape
        step = max(1, _NUMBERS_AT_ONCE // num_inputs)
        if dtype == torch.float32 or num_rows <= step:
            return self._widened(dtype)
        weight = torch.empty(self.shape, dtype=dtype)
        advise_huge_pages(weight)
        for start in range(0, num_rows, step):
            weight[start : start + step] = self.rows(slice(start, start + step))._widened(dtype)
        return weight

    def _widened(self, dtype: torch.dtype) -> torch.Tensor:
        module = implementation("linear", "cpu")
        widened: torch.Tensor | None = module.widen_blocks(self) if hasattr(module, "widen_blocks") else None
        return self.stored().dequantize(dtype) if widened is None else widened.to(dtype)

    def addresses(self) -> torch.Tensor:
        """The addresses of the blocks of each output: int64 [out_features]."""
        rows = [part.data_ptr() + torch.arange(part.shape[0]) * part.stride(0) for part in self.parts]
        addresses = torch.cat(rows)
        return addresses if self.outputs is None else addresses[self.outputs]

    def _all_outputs(self) -> torch.Tensor:
        return torch.arange(self.shape[0]) if self.outputs is None else self.outputs


def _are_finite(weight: BlockWeight) -> bool:
    starts = BLOCK_TYPES[weight.block_type].scales
    halves = [part.view(torch.int16)[..., start // 2] for part in weight.parts for start in starts]
    return not any(((one & _INFINITE) == _INFINITE).any() for one in halves)


def join_blocks(parts: Sequence[BlockWeight]) -> BlockWeight | None:
    """The outputs of all parts, one after another; None where they cannot be one weight."""
    first = parts[0]
    if any((part.block_type, part.shape[1]) != (first.block_type, first.shape[1]) for part in parts):
        return None
    outputs, offset = [], 0
    for part in parts:
        outputs.append(part._all_outputs() + offset)
        offset += sum(len(own) for own in part.parts)
    return replace(first, parts=tuple(own for part in parts for own in part.parts), outputs=torch.cat(outputs))
