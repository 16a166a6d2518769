"""Masks of tokens that the constrained rows of a step may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks for some rows of a step; rows that are not named may take any token.

    Attributes:
        request_ids: Rows that sample in this step, in its order.
        bits: For each of them one mask, and one more behind each of its drafts, one after the other. A mask is one bit
            per token in whole words of 32: token t is bit t % 8, counted from the lowest, of byte t // 8.
    """

    request_ids: Sequence[str]
    bits: bytearray


NO_DRAFTS_MADE: Mapping[str, Sequence[int]] = {}


class MakeTokenMasks(Protocol):
    """Makes the masks of a step; called once, by the runner."""

    def __call__(self, drafts_made: Mapping[str, Sequence[int]] = NO_DRAFTS_MADE, /) -> TokenMasks:
        """`drafts_made`: Request id to the draft tokens in place of its `DRAFT_TO_MAKE`, where the runner made some."""
        ...
