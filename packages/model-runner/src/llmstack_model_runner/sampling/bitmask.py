"""Token bitmasks in the format of xgrammar and llguidance: one bit per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kernels import token_bitmask
from llmstack_model_runner.ragged import ragged_aranges
from llmstack_types import TokenMasks


@dataclass(frozen=True, slots=True)
class TokenBitmask:
    """The tokens that are allowed in some rows.

    Attributes:
        rows: Distinct rows of the logits; in other rows every token is allowed.
        bits: Token t is bit t % 32, counted from the lowest, of word t // 32. [num_masked_rows, ceil(vocab_size / 32)]
    """

    rows: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int32]

    @staticmethod
    def of(masks: TokenMasks, request_ids: Sequence[str], num_places: npt.NDArray[np.int64]) -> TokenBitmask:
        """The masks of at least one row, by rows of the logits.

        Args:
            masks: Masks of some of the rows that sample.
            request_ids: All rows that sample.
            num_places: Number of rows of the logits of each of them. [num_sampling_rows]

        Raises:
            ValueError: A row with a mask does not sample, or the number of masks is not that of the logits' rows.
        """
        index_of = {request_id: index for index, request_id in enumerate(request_ids)}
        try:
            indices = np.array([index_of[request_id] for request_id in masks.request_ids], dtype=np.int64)
        except KeyError as error:
            raise ValueError(f"a token mask is for {error}, which does not sample") from error
        starts = np.cumsum(num_places) - num_places
        rows = ragged_aranges(starts[indices], num_places[indices])
        words = np.frombuffer(masks.bits, dtype=np.int32)
        if len(words) % max(len(rows), 1):
            raise ValueError(f"{4 * len(words)} bytes are no token masks for {len(rows)} places")
        return TokenBitmask(rows, words.reshape(len(rows), -1))

    def select(self, logits_rows: npt.NDArray[np.int64]) -> TokenBitmask | None:
        """The masks of some rows of the logits, ascending, which become rows 0, 1, ...; None if none has a mask."""
        is_chosen = np.isin(self.rows, logits_rows)
        if not is_chosen.any():
            return None
        return TokenBitmask(np.searchsorted(logits_rows, self.rows[is_chosen]), self.bits[is_chosen])


def apply_token_bitmask(logits: torch.Tensor, bitmask: TokenBitmask) -> None:
    """Sets logits of tokens whose bit is 0 to minus infinity, in place; bits beyond the vocabulary are ignored.

    Raises:
        ValueError: The bits are not int32, or not of the shape that logits and rows require.
    """
    rows, bits = torch.from_numpy(bitmask.rows), torch.from_numpy(bitmask.bits)
    token_bitmask.apply_token_bitmask(logits, rows.to(logits.device), bits.to(logits.device))
