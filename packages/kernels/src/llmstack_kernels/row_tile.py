"""How rows that are normed are dealt out to programs of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

# Values of a program: with 4 bytes or less each, short rows go together until every thread has loads of 16 bytes.
_MIN_VALUES = 1024
_VALUES_PER_WARP = 512


@dataclass(frozen=True, slots=True)
class RowTile:
    """Whole rows of one program. It depends on the size of a row only: so does the order of a row's sums."""

    num_rows: int
    block_size: int

    @property
    def num_warps(self) -> int:
        """So many that a thread has 16 values: two loads of 16 bytes of 16-bit numbers."""
        return min(16, max(1, self.num_rows * self.block_size // _VALUES_PER_WARP))

    @property
    def constants(self) -> dict[str, int]:
        """What a kernel is told."""
        return {"NUM_TILE_ROWS": self.num_rows, "BLOCK_SIZE": self.block_size}

    def grid(self, num_rows: int) -> tuple[int]:
        """Programs for so many rows."""
        return (-(-num_rows // self.num_rows),)


def row_tile(size: int) -> RowTile:
    """The tile for rows of `size` values."""
    block_size = 1 << (size - 1).bit_length()
    return RowTile(max(1, _MIN_VALUES // block_size), block_size)
