"""When tokens are spoken: cross attention to sound, by dynamic time warping."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MEDIAN_WIDTH: Final = 7
"""States over which weights are smoothed, as in Whisper."""
_DIAGONAL, _DOWN = 0, 1


def token_starts(weights: NDArray[np.float32], num_states: int) -> list[int]:
    """The state at which each token begins, as transformers finds it.

    Args:
        weights: How much tokens attend to states, [num_tokens, num_heads, num_states_of_a_window].
        num_states: States of the sound, without the silence behind it.
    """
    if not len(weights) or num_states < 1:
        return [0] * len(weights)
    path = warp(-_joined(weights[:, :, :num_states].astype(np.float64)))
    starts = np.full(len(weights), -1)
    for token, state in path:
        if starts[token] < 0:
            starts[token] = state
    return [int(state) for state in starts]


def _joined(weights: NDArray[np.float64]) -> NDArray[np.float64]:  # [num_tokens, num_states]
    """Weights of each head relative to those of other tokens, smoothed, and averaged over heads."""
    deviation = weights.std(axis=0)
    relative = (weights - weights.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    pad = _MEDIAN_WIDTH // 2
    if relative.shape[-1] > pad:
        padded = np.pad(relative, ((0, 0), (0, 0), (pad, pad)), mode="reflect")
        relative = np.median(np.lib.stride_tricks.sliding_window_view(padded, _MEDIAN_WIDTH, axis=-1), axis=-1)
    joined: NDArray[np.float64] = relative.mean(axis=1)
    return joined


def warp(costs: NDArray[np.float64]) -> list[tuple[int, int]]:
    """The cheapest path from the first to the last entry that goes right, down, or both: dynamic time warping.

    Costs are added up along diagonals, whose entries depend on earlier diagonals alone: O(rows * columns) in numpy.
    """
    num_rows, num_columns = costs.shape
    # Diagonal d has the entries (row, d - row) of sums with a border of their own.
    before = np.full(num_rows + 1, np.inf)
    last = np.full(num_rows + 1, np.inf)
    before[0] = 0.0
    steps = np.full((num_rows + 1, num_columns + 1), 2, dtype=np.int8)
    steps[1:, 0] = _DOWN
    for diagonal in range(2, num_rows + num_columns + 1):
        rows = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        both, down, right = before[rows - 1], last[rows - 1], last[rows]
        chosen = np.where((both < down) & (both < right), _DIAGONAL, np.where((down < both) & (down < right), _DOWN, 2))
        least = np.choose(chosen, (both, down, right))
        following = np.full(num_rows + 1, np.inf)
        following[rows] = least + costs[rows - 1, diagonal - rows - 1]
        steps[rows, diagonal - rows] = chosen
        before, last = last, following
    return _traced(steps)


def _traced(steps: NDArray[np.int8]) -> list[tuple[int, int]]:
    row, column = steps.shape[0] - 1, steps.shape[1] - 1
    path = []
    while row > 0 or column > 0:
        path.append((row - 1, column - 1))
        step = steps[row, column]
        row -= step in (_DIAGONAL, _DOWN)
        column -= step != _DOWN
    return [(int(row), int(column)) for row, column in reversed(path) if row >= 0 and column >= 0]
