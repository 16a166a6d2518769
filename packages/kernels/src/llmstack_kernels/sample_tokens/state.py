"""Sampling state of persistent rows on the device: parameters and token counts."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_ENDING_TOKENS = 16
"""Maximum number of tokens that can be masked before `min_tokens`."""

# Places of the parameters in a row's words. Floats are stored as the bits of float64.
TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, MIN_TOKENS, REPETITION, FREQUENCY, PRESENCE, NUM_ENDINGS = range(10)
ENDINGS = 16
NUM_WORDS = ENDINGS + MAX_ENDING_TOKENS


@dataclass(frozen=True, slots=True)
class RowParameters:
    """How the tokens of one row are chosen; the defaults are greedy.

    Attributes:
        temperature: 0 is greedy; else at least the smallest normal float32.
        top_k: From 1 on; the vocabulary's size or more is off.
        top_p: 1 or more is off.
        seed: In two's complement, 64 bits.
        min_tokens: Output tokens before which none of `ending_token_ids` is chosen.
    """

    temperature: float = 0.0
    top_k: int = (1 << 31) - 1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    ending_token_ids: Sequence[int] = ()

    @property
    def has_penalties(self) -> bool:
        """True if tokens seen count."""
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)

    def words(self) -> list[int]:
        """The row of `SamplingState.parameters`: `NUM_WORDS` integers of 64 bits.

        Raises:
            ValueError: More than `MAX_ENDING_TOKENS` ending tokens.
        """
        endings = list(self.ending_token_ids)
        if len(endings) > MAX_ENDING_TOKENS:
            raise ValueError(f"at most {MAX_ENDING_TOKENS} ending tokens can be masked, not {len(endings)}")
        words = [0] * NUM_WORDS
        words[TEMPERATURE], words[TOP_P], words[MIN_P] = map(_bits, (self.temperature, self.top_p, self.min_p))
        words[REPETITION], words[FREQUENCY], words[PRESENCE] = map(
            _bits, (self.repetition, self.frequency, self.presence)
        )
        words[TOP_K], words[SEED], words[MIN_TOKENS] = self.top_k, self.seed, self.min_tokens
        words[NUM_ENDINGS] = len(endings)
        words[ENDINGS : ENDINGS + len(endings)] = endings
        return words


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Parallel tensors on one device, a row each for whatever persistent rows there are.

    Attributes:
        parameters: `RowParameters.words` of each row. int64 [num_rows, NUM_WORDS]
        num_outputs: Tokens that each row has generated. int64 [num_rows]
        token_counts: Twice how often a row has generated a token, and one more if its prompt has it; read only in rows
            with penalties, None while there has been none. int32 [num_rows, vocab_size]
    """

    parameters: torch.Tensor
    num_outputs: torch.Tensor
    token_counts: torch.Tensor | None = None


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits
