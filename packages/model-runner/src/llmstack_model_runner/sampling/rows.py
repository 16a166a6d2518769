"""Sampling parameters of the persistent rows, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from llmstack_model_runner.sampling.bitmask import TokenBitmask
from llmstack_model_runner.sampling.infill import InfillRule, TokenTexts
from llmstack_model_runner.sampling.logit_masks import IntArray
from llmstack_model_runner.sampling.logits_processor import LogitsProcessors, LogitsRows
from llmstack_model_runner.sampling.metadata import RANDOM_PARAMETERS, RandomRows, SamplingMetadata
from llmstack_model_runner.sampling.penalty_rows import PenaltyRows
from llmstack_model_runner.sampling.random import seeds_array
from llmstack_model_runner.sampling.row_extras import AllowedTokens, BatchExtras, RowExtras
from llmstack_types import SamplingParams


class SamplingRows:
    """Sampling parameters by row. A row is set when a request arrives and cleared when it is removed.

    Rarely used parameters are stored per row. A step that differs from the last one only in its tokens runs no loop
    over requests.

    Attributes:
        penalties: The penalties of the rows; they count every generated token.
        texts: What tokens stand for, for rows with `infill`; the owner sets it.
    """

    def __init__(
        self, token_ids: npt.NDArray[np.int32], vocab_size: int, processors: LogitsProcessors | None = None
    ) -> None:
        """Allocates as many rows as `token_ids` has.

        `token_ids`: Tokens of the rows, updated by their owner, drafts included. [max_num_rows, max_num_tokens]
        """
        max_num_rows = len(token_ids)
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._processors = processors or LogitsProcessors()
        self._has_processors = bool(self._processors)
        # Parameters of `SamplingParams` by the names that both classes have.
        self._parameters = {name: np.zeros(max_num_rows, dtype=dtype) for name, dtype in RANDOM_PARAMETERS.items()}
        self.texts = TokenTexts()
        self._infill_rules = np.full(max_num_rows, None, dtype=np.object_)
        self._seeds = np.zeros(max_num_rows, dtype=np.uint64)
        self._num_prompt_tokens = np.zeros(max_num_rows, dtype=np.int64)
        self.penalties = PenaltyRows(token_ids, vocab_size)
        self._extras: dict[int, RowExtras] = {}
        self._allowed_tokens = AllowedTokens(vocab_size)
        self._batch_extras = BatchExtras()
        self._batch_rows: bytes | None = None
        self._rows_beyond_greedy: set[int] = set()

    @property
    def is_all_greedy(self) -> bool:
        """Whether every row takes the most likely token and uses no other parameter."""
        return not self._rows_beyond_greedy and not self._has_processors

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        token_ids: npt.NDArray[np.int64],
        num_prompt_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
        *,
        placeholders: Sequence[range] = (),
    ) -> None:
        """Sets a row to a request's parameters; `token_ids` are its prompt and its generated tokens so far.

        No penalty counts the ids of the prompt at `placeholders`, which stand for vectors.
        """
        for name, column in self._parameters.items():
            column[row] = getattr(params, name)
        # A temperature that float32 rounds to 0 would compute 0/0; this one is effectively greedy.
        smallest = float(np.finfo(np.float32).tiny)
        self._parameters["temperature"][row] = 0.0 if params.is_greedy else max(params.temperature, smallest)
        self._parameters["top_k"][row] = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self._infill_rules[row] = InfillRule.of(params, eos_token_ids, self.texts)
        self._seeds[row] = seeds_array([params.seed or 0])[0]
        self._num_prompt_tokens[row] = num_prompt_tokens
        self.penalties.set_row(row, params, token_ids, num_prompt_tokens, placeholders)
        extras = RowExtras.of(params, eos_token_ids, self._allowed_tokens)
        if extras is not None:
            self._extras[row] = extras
            self._batch_rows = None
        if extras is not None or not params.is_greedy or self.penalties.has_row(row):
            self._rows_beyond_greedy.add(row)
        if self._has_processors:
            self._processors.add_row(row, params, self._token_ids[row], num_prompt_tokens)

    def clear_row(self, row: int) -> None:
        """Removes the parameters of a row."""
        self.penalties.clear_row(row)
        self._rows_beyond_greedy.discard(row)
        if self._extras.pop(row, None) is not None:
            self._batch_rows = None
        if self._has_processors:
            self._processors.remove_row(row)

    def metadata(
        self, rows: IntArray, output_indices: IntArray, bitmask: TokenBitmask | None = None
    ) -> SamplingMetadata:
        """Gathers the given rows, which become rows 0, 1, ... of the logits.

        A row with drafts occurs several times, with output indices that increase by one. For each occurrence the drafts
        before it count as generated.

        Args:
            rows: Persistent rows. [num_logits]
            output_indices: Number of tokens that each of them has generated. [num_logits]
            bitmask: Tokens that grammars allow, by rows of the logits.
        """
        num_known = self._num_prompt_tokens[rows] + output_indices
        metadata = SamplingMetadata(
            random=self._random_rows(rows, output_indices),
            bitmask=bitmask,
            penalties=self.penalties.gather(rows, num_known),
        )
        if self._extras:
            extras = self._gather_extras(rows)
            metadata = replace(
                metadata,
                allowed=extras.allowed,
                masked_tokens=extras.masked_tokens(self._token_ids, rows, num_known, output_indices),
                bias=extras.bias,
                logprobs=extras.logprobs,
                logprob_token_ids=extras.logprob_token_ids,
                forced=extras.forced_tokens(self._token_ids, rows, num_known, output_indices),
                beams=extras.beams,
            )
        if self._has_processors:
            self._processors.update()
            processor_rows = LogitsRows(rows, output_indices)
            metadata = replace(metadata, processors=self._processors, processor_rows=processor_rows)
        return metadata

    def logprob_rows(self, rows: IntArray) -> Sequence[tuple[int, int]]:
        """Pairs of (index into `rows`, number of most likely tokens) of rows that report log-probabilities."""
        return self._gather_extras(rows).logprobs

    def _gather_extras(self, rows: IntArray) -> BatchExtras:
        if not self._extras:
            return BatchExtras()
        # Most steps have the same requests in the same order as the step before.
        key = rows.tobytes()
        if key != self._batch_rows:
            found = {index: self._extras[row] for index, row in enumerate(rows.tolist()) if row in self._extras}
            self._batch_extras, self._batch_rows = BatchExtras.of(found, len(rows)), key
        return self._batch_extras

    def _random_rows(self, rows: IntArray, output_indices: IntArray) -> RandomRows | None:
        chosen = np.flatnonzero(self._parameters["temperature"][rows])
        if not len(chosen):
            return None
        rows = rows[chosen]
        return RandomRows(
            rows=chosen,
            **{name: column[rows] for name, column in self._parameters.items()},
            infill_rules=self._infill_rules[rows],
            seeds=self._seeds[rows],
            output_indices=output_indices[chosen],
        )
