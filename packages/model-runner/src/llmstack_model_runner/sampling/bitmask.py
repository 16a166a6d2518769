"""Token bitmasks, as xgrammar and llguidance fill them: one bit per token, 1 where it may come next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.ragged import ragged_aranges
from llmstack_types import TokenMasks

_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenBitmask:
    """The tokens that some rows may take.

    Attributes:
        rows: Distinct rows of the logits; those not named may take any token.
        bits: Token t is bit t % 32, counted from the lowest, of word t // 32. [num_masked_rows, ceil(vocab_size / 32)]
    """

    rows: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int32]

    @staticmethod
    def of(masks: TokenMasks, request_ids: Sequence[str], num_places: npt.NDArray[np.int64]) -> TokenBitmask:
        """The masks as rows of the logits, which are `num_places` for each of the sampling rows `request_ids`.

        Raises:
            ValueError: A row with a mask does not sample, or there are not as many masks as places.
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


def apply_token_bitmask(logits: torch.Tensor, bitmask: TokenBitmask) -> None:
    """Sets the tokens whose bit is 0 to minus infinity, in place; bits beyond the vocabulary mean nothing.

    Raises:
        ValueError: The bits are no int32 of the shape that the logits and the rows ask for.
    """
    rows, bits, vocab_size = bitmask.rows, bitmask.bits, logits.shape[-1]
    expected = (len(rows), -(-vocab_size // _BITS))
    if bits.dtype != np.int32 or bits.shape != expected:
        raise ValueError(f"a token bitmask must be int32 {list(expected)}, but is {bits.dtype} {list(bits.shape)}")
    is_barred = _barred(bits, vocab_size, logits.device)
    if len(rows) == len(logits) and bool((rows == np.arange(len(rows))).all()):
        logits.masked_fill_(is_barred, -torch.inf)
    else:
        index = torch.from_numpy(rows).to(logits.device)
        logits[index] = logits[index].masked_fill_(is_barred, -torch.inf)


def _barred(bits: npt.NDArray[np.int32], vocab_size: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        little_endian = (~bits).astype("<i4", copy=False).view(np.uint8)
        flags = np.unpackbits(little_endian, axis=-1, count=vocab_size, bitorder="little")
        return torch.from_numpy(flags.view(np.bool_))
    # The words travel, not the flags: a thirty-second of the bytes.
    shifts = torch.arange(_BITS, dtype=torch.int32, device=device)
    flags_ = (torch.from_numpy(bits).to(device)[:, :, None] >> shifts) & 1
    return flags_.flatten(1)[:, :vocab_size] == 0
