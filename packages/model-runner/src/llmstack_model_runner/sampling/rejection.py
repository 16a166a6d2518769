"""Verifies draft tokens by rejection sampling: what remains is distributed as if there had been no drafts.

Rejection sampling (Leviathan et al., Chen et al., 2023) takes a draft x that was guessed for sure with the probability
p(x) that the model gives it, and otherwise draws from p without x, renormalised. Both steps are one draw from p: the
draw equals x with probability p(x), and given that it does not, it is distributed as p without x. So each place draws
its token by its own uniform number, as it would without drafts, and a draft is accepted where it equals that token.
Nothing is lost, since no rule accepts x more often than p(x), and more is won: the text of a seeded request is the
same whatever was guessed, which two further random numbers per place would not give. Greedy rows, whose p is one token,
are no special case.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

NO_DRAFT = -1
"""Stands where a place has no draft: no token equals it."""


def count_kept(
    token_ids: IntArray, is_good: npt.NDArray[np.bool_], draft_token_ids: IntArray, num_places: IntArray
) -> IntArray:
    """How many of each row's tokens are kept: up to the first that differs from its draft, and with it.

    Later ones were drawn after a draft that turned out wrong. A token that is no good ends its row as well.

    Args:
        token_ids: What was drawn at each place, rows one after the other. [sum of num_places]
        is_good: False where nothing could be drawn. [sum of num_places]
        draft_token_ids: Parallel to `token_ids`; the last place of each row has `NO_DRAFT`.
        num_places: At least 1. [num_rows]
    """
    last_kept = np.flatnonzero((token_ids != draft_token_ids) | ~is_good)
    starts = np.cumsum(num_places) - num_places
    return last_kept[np.searchsorted(last_kept, starts)] - starts + 1
