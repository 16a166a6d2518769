"""Rejection sampling of draft tokens, which keeps the model's distribution.

Rejection sampling (Leviathan et al., Chen et al., 2023) accepts a deterministic draft x with the model's probability
p(x), and otherwise draws from p without x, renormalised. Both steps are one draw from p: the draw equals x with
probability p(x), and otherwise it is distributed as p without x. So each place draws its token by its own uniform
number, as without drafts, and a draft is accepted if it equals that token. The acceptance rate is optimal, since no
rule accepts x more often than p(x). The text of a seeded request does not depend on the drafts, which a separate random
number for acceptance would not achieve. Greedy rows, whose p is one token, are no special case.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

NO_DRAFT = -1
"""Marks a place without a draft; no token id equals it."""


def count_kept(
    token_ids: IntArray, is_good: npt.NDArray[np.bool_], draft_token_ids: IntArray, num_places: IntArray
) -> IntArray:
    """Number of tokens kept in each row: up to and including the first that differs from its draft.

    Later tokens were drawn after a wrong draft. An invalid token ends its row too.

    Args:
        token_ids: Tokens drawn at each place, row by row. [sum of num_places]
        is_good: False if no token could be drawn. [sum of num_places]
        draft_token_ids: Parallel to `token_ids`; the last place of each row has `NO_DRAFT`.
        num_places: At least 1. [num_rows]
    """
    last_kept = np.flatnonzero((token_ids != draft_token_ids) | ~is_good)
    starts = np.cumsum(num_places) - num_places
    return last_kept[np.searchsorted(last_kept, starts)] - starts + 1
