"""Products of vectors of tokens, which need arrays."""

from __future__ import annotations

from array import array

import numpy as np


def late_interaction(first: array[float], num_first: int, second: array[float], num_second: int) -> float:
    """For each vector of `first` the largest product with one of `second`, summed up, as ColBERT scores texts.

    Both are float32 numbers of `num_first` and `num_second` vectors of one size, one after the other. Takes
    O(num_first * num_second * size), in blocks that are at most 16 MiB.
    """
    queries, documents = (
        np.asarray(numbers, dtype=np.float32).reshape(count, -1)
        for numbers, count in ((first, num_first), (second, num_second))
    )
    block = max(1, (1 << 22) // num_second)
    return float(sum((queries[i : i + block] @ documents.T).max(1).sum() for i in range(0, num_first, block)))
