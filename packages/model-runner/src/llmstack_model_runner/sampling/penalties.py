"""Repetition, frequency and presence penalties, and counts of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.sampling.logit_masks import IntArray, TokenEntries

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalised entries and their penalties; parallel arrays.

    Attributes:
        entries: Distinct tokens of each penalised row, in prompt or output.
        output_counts: Number of times that each was generated; 0 for tokens only in the prompt.
    """

    entries: TokenEntries
    output_counts: FloatArray  # [num_entries]
    repetition: FloatArray  # [num_entries]
    frequency: FloatArray  # [num_entries]
    presence: FloatArray  # [num_entries]


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """Applies penalties to the logits, in place.

    Repetition (Keskar et al., 2019) divides positive and multiplies negative logits of tokens in prompt or output.
    Frequency subtracts once per occurrence in the output, presence once per token, as the OpenAI API defines them.
    """
    index = penalties.entries.index(logits.device)
    repetition = torch.from_numpy(penalties.repetition).to(logits.device)
    counts = penalties.output_counts
    subtracted = penalties.frequency * counts + penalties.presence * (counts > 0)
    seen = logits[index]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    logits[index] = seen - torch.from_numpy(subtracted).to(logits.device)


class TokenCounts:
    """Counts of the distinct tokens of each persistent row, as a sparse set per row.

    The cost of a step depends on the tokens seen and not on the vocabulary, and all rows are processed at once. A
    sparse set (Briggs and Torczon, 1993) is a list of members and, for each possible member, its place in the list. The
    arrays are virtual memory until tokens are counted: at most 4 bytes per row and token of the vocabulary, and 8 per
    token of the row.
    """

    def __init__(self, max_num_rows: int, vocab_size: int, max_num_tokens: int) -> None:
        """Allocates empty sets. `max_num_tokens`: Maximum number of tokens of one row."""
        width = min(vocab_size, max_num_tokens)
        self._vocab_size = vocab_size
        self._places = np.zeros((max_num_rows, vocab_size), dtype=np.int32)  # 0 means none, 1 the first column
        self._token_ids = np.zeros((max_num_rows, width), dtype=np.int32)
        self._output_counts = np.zeros((max_num_rows, width), dtype=np.float32)
        self._num_distinct = np.zeros(max_num_rows, dtype=np.int64)

    def set_row(self, row: int, token_ids: IntArray, num_prompt_tokens: int) -> None:
        """Replaces the row's tokens: those of the prompt count as seen, the others as generated."""
        num_distinct = self._num_distinct[row]
        self._places[row, self._token_ids[row, :num_distinct]] = 0
        self._output_counts[row, :num_distinct] = 0.0
        self._num_distinct[row] = 0
        rows = np.full(len(token_ids), row, dtype=np.int64)
        self._insert(rows, token_ids)
        self.add(rows[num_prompt_tokens:], token_ids[num_prompt_tokens:])

    def add(self, rows: IntArray, token_ids: IntArray) -> None:
        """Counts generated tokens; a row may occur several times."""
        self._insert(rows, token_ids)
        np.add.at(self._output_counts, (rows, self._places[rows, token_ids] - 1), 1.0)

    def entries(self, rows: IntArray) -> tuple[TokenEntries, FloatArray]:
        """Distinct tokens of the given rows, which become rows 0, 1, ..., and their counts in the output."""
        num_distinct = self._num_distinct[rows]
        index = np.repeat(np.arange(len(rows)), num_distinct)
        starts = np.cumsum(num_distinct) - num_distinct
        columns = np.arange(len(index)) - starts[index]
        flat = rows[index], columns
        return TokenEntries(index, self._token_ids[flat].astype(np.int64)), self._output_counts[flat]

    def _insert(self, rows: IntArray, token_ids: IntArray) -> None:
        is_new = self._places[rows, token_ids] == 0
        if not is_new.any():
            return
        rows, token_ids = np.divmod(np.unique(rows[is_new] * self._vocab_size + token_ids[is_new]), self._vocab_size)
        columns = self._num_distinct[rows] + np.arange(len(rows)) - np.searchsorted(rows, rows)
        self._token_ids[rows, columns] = token_ids
        self._places[rows, token_ids] = columns + 1
        np.add.at(self._num_distinct, rows, 1)


def add_output_tokens(
    entries: TokenEntries, output_counts: FloatArray, added: TokenEntries, vocab_size: int
) -> tuple[TokenEntries, FloatArray]:
    """The entries with draft tokens added as generated, which no row has counted yet."""
    keys = np.concatenate([entries.rows, added.rows]) * vocab_size
    keys += np.concatenate([entries.token_ids, added.token_ids])
    counts = np.concatenate([output_counts, np.ones(len(added.rows), dtype=np.float32)])
    distinct, inverse = np.unique(keys, return_inverse=True)
    rows, token_ids = np.divmod(distinct, vocab_size)
    return TokenEntries(rows, token_ids), np.bincount(inverse, weights=counts).astype(np.float32)
