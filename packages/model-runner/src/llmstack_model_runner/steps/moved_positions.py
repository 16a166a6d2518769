"""Positions of tokens behind pictures, which differ from their places: M-RoPE."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmstack_model_runner.ragged import IntArray


class MovedPositions:
    """By row, how far the positions of its tokens are from their places; empty for most models.

    It follows from the prompt alone, so that no chunk, preemption or hit changes a position.
    """

    def __init__(self, max_num_rows: int) -> None:
        self._deltas = np.zeros(max_num_rows, dtype=np.int64)  # behind the last item
        self._ends = np.zeros(max_num_rows, dtype=np.int64)  # of the last item
        self._rows: dict[int, tuple[IntArray, IntArray]] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def set_row(self, row: int, items: Sequence[tuple[int, int]]) -> None:
        """`items`: The end of each, ascending, and by how much positions behind it are moved on."""
        ends = np.array([end for end, _ in items], dtype=np.int64)
        deltas = np.cumsum([0, *(moved for _, moved in items)], dtype=np.int64)
        self._rows[row] = ends, deltas
        self._deltas[row], self._ends[row] = deltas[-1], ends[-1]

    def clear_row(self, row: int) -> None:
        """Forgets a row; it may have none."""
        if self._rows.pop(row, None) is not None:
            self._deltas[row] = self._ends[row] = 0

    def of_tokens(self, rows: IntArray, places: IntArray) -> IntArray:
        """Positions of tokens at these places of these rows; inside an item they go on from its first one."""
        if not self._rows:
            return places
        moved: IntArray = places + self._deltas[rows]
        early = places < self._ends[rows]
        for row in np.unique(rows[early]).tolist():
            own = early & (rows == row)
            ends, deltas = self._rows[row]
            moved[own] = places[own] + deltas[np.searchsorted(ends, places[own], side="right")]
        return moved
