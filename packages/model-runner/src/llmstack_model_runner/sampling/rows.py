"""Sampling parameters of the persistent rows, as arrays; what few requests use is kept aside, by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmstack_model_runner.sampling.logit_masks import TokenIds
from llmstack_model_runner.sampling.metadata import RandomRows, SamplingMetadata
from llmstack_model_runner.sampling.penalties import PenaltyRow, TokenCounts
from llmstack_model_runner.sampling.random import seeds_array
from llmstack_types import SamplingParams


@dataclass(frozen=True, slots=True)
class _Extras:
    """What a row needs beyond temperature, top-k, top-p and min-p."""

    num_logprobs: int | None
    min_tokens: int
    barred_token_ids: TokenIds
    allowed_token_ids: TokenIds | None
    logit_bias: tuple[TokenIds, npt.NDArray[np.float32]] | None
    counts: TokenCounts | None
    params: SamplingParams


class SamplingRows:
    """Sampling parameters by row; a row is set when a request arrives and cleared when it leaves."""

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        """Makes room for `max_num_rows` rows."""
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_num_rows, dtype=np.float32)
        self._top_k = np.zeros(max_num_rows, dtype=np.int64)
        self._top_p = np.ones(max_num_rows, dtype=np.float64)
        self._min_p = np.zeros(max_num_rows, dtype=np.float32)
        self._seeds = np.zeros(max_num_rows, dtype=np.uint64)
        self._extras: dict[int, _Extras] = {}

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        token_ids: npt.NDArray[np.int64],
        num_prompt_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """Takes over a request's parameters; `token_ids` are its prompt and what it has generated so far."""
        # A temperature that float32 would round to 0 would turn 0/0 into NaN; this one is as good as greedy.
        smallest = float(np.finfo(np.float32).tiny)
        self._temperature[row] = 0.0 if params.is_greedy else max(params.temperature, smallest)
        self._top_k[row] = min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seeds[row] = seeds_array([params.seed or 0])[0]
        extras = self._make_extras(params, token_ids, num_prompt_tokens, eos_token_ids)
        if extras is not None:
            self._extras[row] = extras

    def clear_row(self, row: int) -> None:
        """Forgets a row's request."""
        self._extras.pop(row, None)

    def count_tokens(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Notes one generated token per row, for penalties."""
        if not self._extras:
            return
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            extras = self._extras.get(row)
            if extras is not None and extras.counts is not None:
                extras.counts.add(token_id)

    def metadata(self, rows: npt.NDArray[np.int64], output_indices: npt.NDArray[np.int64]) -> SamplingMetadata:
        """Gathers the given rows, which become rows 0, 1, ... of the logits.

        Args:
            rows: Persistent rows. [num_logits]
            output_indices: How many tokens each of them has generated. [num_logits]
        """
        random = self._random_rows(rows, output_indices)
        if not self._extras:
            return SamplingMetadata(random=random)
        found = [(index, self._extras[row]) for index, row in enumerate(rows.tolist()) if row in self._extras]
        return SamplingMetadata(
            random=random,
            allowed_token_ids=[(i, e.allowed_token_ids) for i, e in found if e.allowed_token_ids is not None],
            logit_bias=[(i, *e.logit_bias) for i, e in found if e.logit_bias is not None],
            barred_token_ids=[(i, e.barred_token_ids) for i, e in found if output_indices[i] < e.min_tokens],
            penalties=[_penalty_row(i, e.counts, e.params) for i, e in found if e.counts is not None],
            logprobs=[(i, e.num_logprobs) for i, e in found if e.num_logprobs is not None],
        )

    def _random_rows(self, rows: npt.NDArray[np.int64], output_indices: npt.NDArray[np.int64]) -> RandomRows | None:
        chosen = np.flatnonzero(self._temperature[rows])
        if not len(chosen):
            return None
        rows = rows[chosen]
        return RandomRows(
            rows=chosen,
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seeds=self._seeds[rows],
            output_indices=output_indices[chosen],
        )

    def _make_extras(
        self,
        params: SamplingParams,
        token_ids: npt.NDArray[np.int64],
        num_prompt_tokens: int,
        eos_token_ids: tuple[int, ...],
    ) -> _Extras | None:
        has_penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (
            1.0,
            0.0,
            0.0,
        )
        is_plain = params.logprobs is None and not (
            has_penalties or params.min_tokens or params.logit_bias or params.allowed_token_ids
        )
        if is_plain:
            return None
        bias, allowed = params.logit_bias, params.allowed_token_ids
        return _Extras(
            num_logprobs=params.logprobs,
            min_tokens=params.min_tokens,
            barred_token_ids=self._in_vocabulary({*eos_token_ids, *(params.stop_token_ids or ())}),
            allowed_token_ids=self._in_vocabulary(set(allowed)) if allowed else None,
            logit_bias=self._bias_arrays(dict(bias)) if bias else None,
            counts=TokenCounts(token_ids, num_prompt_tokens) if has_penalties else None,
            params=params,
        )

    def _in_vocabulary(self, token_ids: set[int]) -> TokenIds:
        # Stop ids may name tokens that the tokenizer knows and the model has no logit for.
        return np.array(sorted(t for t in token_ids if 0 <= t < self._vocab_size), dtype=np.int64)

    def _bias_arrays(self, logit_bias: dict[int, float]) -> tuple[TokenIds, npt.NDArray[np.float32]]:
        token_ids = self._in_vocabulary(set(logit_bias))
        return token_ids, np.array([logit_bias[int(t)] for t in token_ids], dtype=np.float32)


def _penalty_row(index: int, counts: TokenCounts, params: SamplingParams) -> PenaltyRow:
    return PenaltyRow(
        row=index,
        counts=counts,
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
    )
