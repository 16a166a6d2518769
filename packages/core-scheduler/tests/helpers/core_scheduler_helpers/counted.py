"""Tokens that count how many of them are read."""

from __future__ import annotations

from itertools import pairwise
from typing import Any


class Counted(list[int]):
    """A list of tokens with the number of those read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def most_read_per_step(drafts: Any, token_id: int, owner: Any) -> int:
    """The most tokens that one of 50 steps reads of a text of 3,000 tokens, to which each adds `token_id`.

    Raises:
        AssertionError: The first step has not read the whole text.
    """
    token_ids, nums_read = Counted([1, 2, 3] * 1000), []
    for _ in range(50):
        token_ids.append(token_id)
        drafts.propose("a", token_ids, 5, owner)
        nums_read.append(token_ids.num_read)
    assert nums_read[0] > 3000
    return max(after - before for before, after in pairwise(nums_read))
