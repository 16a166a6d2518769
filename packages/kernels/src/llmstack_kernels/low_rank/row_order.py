"""Rows of a step in the order of the factors they use, in tiles of equal ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Send = Callable[[Sequence[npt.NDArray[Any]]], Sequence[torch.Tensor]]
"""A copy of arrays to the device for which the host does not wait."""
_NUM_TILE_FIELDS = 3


class RowOrder:
    """Rows in the order of their slots, in memory that stays where it is.

    Attributes:
        rows: Rows that have a slot, those of the first slot first: int32 [max_num_rows].
        tiles: Slot, first place in `rows` and number of rows of each tile: int32 [max_num_rows, 3].
        num_tiles: int32 [1].
        num_tile_rows: Most rows of a tile.
    """

    def __init__(self, max_num_rows: int, device: torch.device) -> None:
        self.num_tile_rows = 4 if device.type == "cpu" else 16
        self.rows = torch.zeros(max_num_rows, dtype=torch.int32, device=device)
        self.tiles = torch.zeros((max_num_rows, _NUM_TILE_FIELDS), dtype=torch.int32, device=device)
        self.num_tiles = torch.zeros(1, dtype=torch.int32, device=device)
        self.host_tiles: list[list[int]] = []
        self.host_rows: list[int] = []
        self._grouped: bytes | None = None  # the slots of the rows that are in order

    @property
    def num_launched_tiles(self) -> int:
        """Tiles for which kernels are started; these find on the device how many there are."""
        return len(self.host_tiles)

    def group(self, row_slots: npt.NDArray[Any], send: Send | None = None) -> bool:
        """Orders the rows of a step by their slots, -1 for a row without; whether any row has one.

        `send`: Copies arrays to the device; by default the host waits for that.
        """
        wanted = row_slots.tobytes()
        if wanted == self._grouped:  # as in most decode steps
            return bool(self.host_tiles)
        self._grouped = None  # until all is sent: it may fail, and is tried again
        order = np.argsort(row_slots, kind="stable")
        order = order[np.searchsorted(row_slots[order], 0) :]
        ordered = row_slots[order]
        tiles: list[list[int]] = []
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else ordered
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(ordered)], strict=False):
            slot = int(ordered[start])
            firsts = range(start, end, self.num_tile_rows)
            tiles.extend([slot, first, min(self.num_tile_rows, end - first)] for first in firsts)
        self.host_tiles, self.host_rows = tiles, order.tolist()
        if tiles:
            arrays = order.astype(np.int32), np.array(tiles, dtype=np.int32)
            rows, of_tiles = map(torch.from_numpy, arrays) if send is None else send(arrays)
            self.rows[: len(order)].copy_(rows)
            self.tiles[: len(tiles)].copy_(of_tiles)
        self.num_tiles.fill_(len(tiles))
        self._grouped = wanted
        return bool(tiles)
