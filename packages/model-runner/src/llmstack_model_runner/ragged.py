"""Index arithmetic for concatenated rows of different lengths."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def ragged_aranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenation of start, start + 1, ... of each row: [sum of lengths].

    Args:
        starts: [num_rows]
        lengths: Not negative. [num_rows]
    """
    ends = np.cumsum(lengths)
    num_entries = int(ends[-1]) if len(ends) else 0
    aranges: IntArray = np.repeat(starts - (ends - lengths), lengths) + np.arange(num_entries)
    return aranges
