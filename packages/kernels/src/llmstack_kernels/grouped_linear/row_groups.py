"""Rows in the order of their experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Which rows each expert has: made once per layer of experts, used by all its products.

    Attributes:
        rows: int64 [num_rows], all rows, those of the first expert first, in order.
        starts: int32 [num_experts + 1], where each expert's begin in `rows`.
        num_tokens: Tokens.
        num_choices: Rows of a token.
        tile_experts: int32 [num_tiles], the expert of each tile of `tile_rows` rows, num_experts behind the last tile;
            None where no kernel needs tiles.
        tile_starts: int32 [num_tiles], where each tile begins in `rows`.
        tile_rows: Rows of a tile.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    num_tokens: int
    num_choices: int
    tile_experts: torch.Tensor | None = None
    tile_starts: torch.Tensor | None = None
    tile_rows: int = 0

    @property
    def num_rows(self) -> int:
        """Choices of all tokens."""
        return self.num_tokens * self.num_choices

    @property
    def num_experts(self) -> int:
        """Experts, those without rows included."""
        return self.starts.shape[0] - 1
