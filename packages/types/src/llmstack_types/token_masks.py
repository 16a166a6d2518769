"""Which tokens the constrained rows of a step may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
