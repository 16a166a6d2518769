"""Learned positions of a square, stretched over the patches of a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from llmstack_model_runner.layers import Embedding, WeightSlot


class SquarePositions:
    """A vector for each cell of a square; a patch between four cells has their weighted sum."""

    def __init__(self, name: str, num_cells: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """ValueError: So many cells are no square."""
        self._side = math.isqrt(num_cells)
        if self._side**2 != num_cells:
            raise ValueError(f"config.json: vision_config.num_position_embeddings: {num_cells} is no square.")
        self._cells = Embedding(name, num_cells, size, dtype=dtype, device=device)

    def slots(self) -> dict[str, WeightSlot]:
        return self._cells.slots()

    def __call__(self, places: torch.Tensor, sides: Sequence[int]) -> torch.Tensor:
        """Positions [patches, size] of rows and columns [2, patches] of a picture of so many patches per side.

        The corners of the picture are those of the square. The arithmetic is transformers', step by step.
        """
        axes = [self._between(axis, length) for axis, length in zip(places, sides, strict=True)]
        (rows, row_weights), (columns, column_weights) = axes
        cells = (rows[:, :, None] * self._side + columns[:, None, :]).flatten(1)
        weights = (row_weights[:, :, None] * column_weights[:, None, :]).flatten(1)  # [patches, 4], float32
        vectors = self._cells(cells.flatten()).view(*cells.shape, -1)
        return (vectors * weights[:, :, None]).sum(1).to(vectors.dtype)

    def _between(self, places: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The two cells along a side that each place lies between, and their weights: [patches, 2] each."""
        found = places.float() * (self._side - 1) / max(length - 1, 1)
        first = found.floor()
        steps = torch.arange(2, device=places.device)
        cells = (first.long()[:, None] + steps).clamp(0, self._side - 1)
        return cells, (1 - (found[:, None] - first[:, None] - steps).abs()).clamp(min=0)
