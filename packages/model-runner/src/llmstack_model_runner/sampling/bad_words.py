"""Bad words: token sequences whose last token is masked after the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmstack_model_runner.sampling.logit_masks import IntArray, TokenEntries


@dataclass(frozen=True, slots=True)
class BadWords:
    """Sequences of several tokens, of all rows; parallel arrays.

    Attributes:
        rows: Row of the logits that each sequence applies to.
        prefixes: All tokens but the last one, right-aligned, with -1 before them.
        lengths: Lengths of the prefixes; at least 1.
        token_ids: The last tokens.
    """

    rows: IntArray  # [num_sequences]
    prefixes: IntArray  # [num_sequences, max_length]
    lengths: IntArray  # [num_sequences]
    token_ids: IntArray  # [num_sequences]

    @staticmethod
    def of(sequences: Sequence[tuple[int, Sequence[int]]]) -> BadWords:
        """Builds the arrays from pairs of (row of the logits, sequence of at least two tokens)."""
        lengths = np.array([len(sequence) - 1 for _, sequence in sequences], dtype=np.int64)
        prefixes = np.full((len(sequences), int(lengths.max())), -1, dtype=np.int64)
        for index, (_, sequence) in enumerate(sequences):
            prefixes[index, prefixes.shape[1] - len(sequence) + 1 :] = sequence[:-1]
        return BadWords(
            rows=np.array([row for row, _ in sequences], dtype=np.int64),
            prefixes=prefixes,
            lengths=lengths,
            token_ids=np.array([sequence[-1] for _, sequence in sequences], dtype=np.int64),
        )

    def masked_tokens(
        self, token_ids: npt.NDArray[np.int32], rows: IntArray, num_known: IntArray, output_indices: IntArray
    ) -> TokenEntries:
        """The entries to mask in this step. Sequences match generated tokens only, not the prompt.

        Args:
            token_ids: Tokens of the persistent rows. [max_num_rows, max_num_tokens]
            rows: Persistent row of each row of the logits.
            num_known: Number of tokens of each row before the one that is chosen, prompt included.
            output_indices: Number of generated tokens among them.
        """
        columns = num_known[:, None] - self.prefixes.shape[1] + np.arange(self.prefixes.shape[1])
        tails = token_ids[rows[:, None], np.maximum(columns, 0)]
        is_match = ((tails[self.rows] == self.prefixes) | (self.prefixes < 0)).all(axis=1)
        is_match &= self.lengths <= output_indices[self.rows]
        return TokenEntries(self.rows[is_match], self.token_ids[is_match])
