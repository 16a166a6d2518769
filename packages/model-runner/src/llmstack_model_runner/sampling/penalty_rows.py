"""Penalties of the persistent rows: their sizes and the tokens they apply to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmstack_model_runner.sampling.logit_masks import IntArray, TokenEntries
from llmstack_model_runner.sampling.penalties import Penalties, TokenCounts, add_output_tokens
from llmstack_types import SamplingParams


class PenaltyRows:
    """Sizes of penalties as arrays, and counts of tokens, allocated when the first row needs them."""

    def __init__(self, token_ids: npt.NDArray[np.int32], vocab_size: int) -> None:
        """`token_ids`: Tokens of the persistent rows, kept up to date by their owner. [max_num_rows, max_num_tokens]"""
        max_num_rows = len(token_ids)
        self._all_token_ids = token_ids
        self._vocab_size = vocab_size
        self._counts: TokenCounts | None = None
        self._is_penalised = np.zeros(max_num_rows, dtype=np.bool_)
        self._num_counted = np.zeros(max_num_rows, dtype=np.int64)
        self._sizes = np.zeros((3, max_num_rows), dtype=np.float32)

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        token_ids: IntArray,
        num_prompt_tokens: int,
        placeholders: Sequence[range] = (),
    ) -> None:
        """Sets a row to a request; `token_ids` are its prompt and its generated tokens so far.

        The ids of the prompt at `placeholders` are not counted.
        """
        sizes = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._is_penalised[row] = sizes != (1.0, 0.0, 0.0)
        if not self._is_penalised[row]:
            return
        if self._counts is None:
            self._counts = TokenCounts(len(self._all_token_ids), self._vocab_size, self._all_token_ids.shape[1])
        is_counted = np.ones(len(token_ids), dtype=np.bool_)
        for places in placeholders:
            is_counted[places.start : places.stop] = False
        num_skipped = sum(map(len, placeholders))
        self._counts.set_row(row, token_ids[is_counted], num_prompt_tokens - num_skipped)
        self._num_counted[row] = len(token_ids)
        self._sizes[:, row] = sizes

    def has_row(self, row: int) -> bool:
        """Whether the row's request has a penalty."""
        return bool(self._is_penalised[row])

    def clear_row(self, row: int) -> None:
        """Removes the penalties of a row."""
        self._is_penalised[row] = False

    def count_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        """Counts generated tokens; a row may occur several times."""
        if self._counts is None:
            return
        is_penalised = self._is_penalised[rows]
        if is_penalised.any():
            rows = rows[is_penalised]
            self._counts.add(rows, token_ids[is_penalised])
            np.add.at(self._num_counted, rows, 1)

    def gather(self, rows: IntArray, num_known: IntArray) -> Penalties | None:
        """The penalties of the given rows, which become rows 0, 1, ...; None if there are none.

        Tokens between the counted ones and `num_known` are drafts, which count as generated for these logits.
        """
        chosen = np.flatnonzero(self._is_penalised[rows])
        if self._counts is None or not len(chosen):
            return None
        rows, num_known = rows[chosen], num_known[chosen]
        entries, output_counts = self._counts.entries(rows)
        num_drafts = num_known - self._num_counted[rows]
        if (num_drafts > 0).any():
            drafts = self._drafts(rows, np.maximum(num_drafts, 0))
            entries, output_counts = add_output_tokens(entries, output_counts, drafts, self._vocab_size)
        repetition, frequency, presence = self._sizes[:, rows[entries.rows]]
        return Penalties(
            TokenEntries(chosen[entries.rows], entries.token_ids), output_counts, repetition, frequency, presence
        )

    def _drafts(self, rows: IntArray, num_drafts: IntArray) -> TokenEntries:
        index = np.repeat(np.arange(len(rows)), num_drafts)
        columns = self._num_counted[rows[index]] + np.arange(len(index)) - (np.cumsum(num_drafts) - num_drafts)[index]
        return TokenEntries(index, self._all_token_ids[rows[index], columns].astype(np.int64))
