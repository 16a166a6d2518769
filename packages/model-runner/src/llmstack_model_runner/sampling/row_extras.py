"""Rare sampling parameters: masks, bias, bad words, repetition, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from llmstack_model_runner.sampling.bad_words import BadWords
from llmstack_model_runner.sampling.logit_masks import IntArray, LogitBias, TokenEntries
from llmstack_model_runner.sampling.repeated_ngrams import after_repeated_ngrams
from llmstack_model_runner.sampling.thinking import ThinkingLimit
from llmstack_types import SamplingParams

MAX_KEPT_SEQUENCES: Final = 2


class AllowedTokens:
    """The arrays of the last sequences of allowed tokens.

    The beams of a search share a sequence, which may be long, and each step has new rows for them.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._kept: list[tuple[tuple[int, ...], IntArray]] = []

    def array(self, token_ids: Sequence[int]) -> IntArray:
        """The distinct ids in the vocabulary, ascending; the same array for the same tuple."""
        for known, array in self._kept:
            if known is token_ids:
                return array
        array = np.unique(np.array(token_ids, dtype=np.int64))
        array = array[(array >= 0) & (array < self.vocab_size)]
        if isinstance(token_ids, tuple):  # a list may change
            self._kept = [*self._kept, (token_ids, array)][-MAX_KEPT_SEQUENCES:]
        return array


@dataclass(frozen=True, slots=True)
class RowExtras:
    """Rarely used parameters of one request."""

    num_logprobs: int | None
    logprob_token_ids: IntArray | None
    min_tokens: int
    ending_token_ids: IntArray
    allowed_token_ids: IntArray | None
    bias: tuple[IntArray, npt.NDArray[np.float32]] | None
    bad_token_ids: IntArray
    bad_sequences: Sequence[tuple[int, ...]]
    ngram_size: int
    thinking: ThinkingLimit | None
    is_beam: bool

    @staticmethod
    def of(params: SamplingParams, eos_token_ids: Sequence[int], tokens: AllowedTokens) -> RowExtras | None:
        """The parameters of a request, or None if it has none. Ids outside the vocabulary are dropped."""
        vocab_size = tokens.vocab_size
        thinking, wanted = ThinkingLimit.of(params), params.logprob_token_ids
        is_plain = (
            params.logprobs is None
            and thinking is None
            and not (params.min_tokens or params.logit_bias or params.allowed_token_ids or params.bad_words_token_ids)
            and not params.no_repeat_ngram_size
        )
        # The grammar of a constrained row decides whether the row may end.
        min_tokens = 0 if params.structured_outputs is not None else params.min_tokens
        if is_plain:
            return None
        bad = [one for one in params.bad_words_token_ids if all(0 <= token_id < vocab_size for token_id in one)]
        allowed = tokens.array(params.allowed_token_ids) if params.allowed_token_ids else None
        bad_token_ids = _in_vocabulary({one[0] for one in bad if len(one) == 1}, vocab_size)
        if allowed is not None and not len(allowed):  # no entry could say that none is allowed
            allowed, bad_token_ids = None, np.arange(vocab_size)
        return RowExtras(
            num_logprobs=params.logprobs,
            logprob_token_ids=_distinct(wanted, vocab_size) if wanted else None,
            min_tokens=min_tokens,
            ending_token_ids=_in_vocabulary({*eos_token_ids, *(params.stop_token_ids or ())}, vocab_size),
            allowed_token_ids=allowed,
            bias=_bias(params.logit_bias, vocab_size) if params.logit_bias else None,
            bad_token_ids=bad_token_ids,
            bad_sequences=[one for one in bad if len(one) > 1],
            ngram_size=params.no_repeat_ngram_size,
            thinking=thinking,
            is_beam=params.use_beam_search,
        )


@dataclass(frozen=True, slots=True)
class BatchExtras:
    """The extras of one step's rows of logits; valid while steps have the same requests in the same order."""

    logprobs: Sequence[tuple[int, int]] = ()
    logprob_token_ids: Mapping[int, IntArray] = field(default_factory=dict)
    allowed: TokenEntries | None = None
    bias: LogitBias | None = None
    endings: TokenEntries | None = None  # masked before the row's min_tokens
    min_tokens: IntArray | None = None  # [num_rows]
    bad_tokens: TokenEntries | None = None
    bad_words: BadWords | None = None
    ngram_sizes: Sequence[tuple[int, int]] = ()
    thinking: Sequence[tuple[int, ThinkingLimit]] = ()
    beams: Sequence[int] = ()

    @staticmethod
    def of(rows: Mapping[int, RowExtras], num_rows: int) -> BatchExtras:
        """Gathers the extras. `rows`: Row of the logits to its extras."""
        min_tokens = np.zeros(num_rows, dtype=np.int64)
        min_tokens[list(rows)] = [extras.min_tokens for extras in rows.values()]
        sequences = [(row, sequence) for row, extras in rows.items() for sequence in extras.bad_sequences]
        return BatchExtras(
            logprobs=[(row, one.num_logprobs) for row, one in rows.items() if one.num_logprobs is not None],
            logprob_token_ids={
                row: one.logprob_token_ids for row, one in rows.items() if one.logprob_token_ids is not None
            },
            allowed=_entries(rows, lambda extras: extras.allowed_token_ids),
            bias=_batch_bias(rows),
            endings=_entries(rows, lambda extras: extras.ending_token_ids if extras.min_tokens else None),
            min_tokens=min_tokens,
            bad_tokens=_entries(rows, lambda extras: extras.bad_token_ids if len(extras.bad_token_ids) else None),
            bad_words=BadWords.of(sequences) if sequences else None,
            ngram_sizes=[(row, one.ngram_size) for row, one in rows.items() if one.ngram_size],
            thinking=[(row, one.thinking) for row, one in rows.items() if one.thinking is not None],
            beams=[row for row, one in rows.items() if one.is_beam],
        )

    def masked_tokens(
        self, token_ids: npt.NDArray[np.int32], rows: IntArray, num_known: IntArray, output_indices: IntArray
    ) -> TokenEntries | None:
        """Entries to mask in this step, or None; the arguments are those of `BadWords.masked_tokens`."""
        parts = [] if self.bad_tokens is None else [self.bad_tokens]
        if self.endings is not None and self.min_tokens is not None:
            is_early = (output_indices < self.min_tokens)[self.endings.rows]
            parts.append(TokenEntries(self.endings.rows[is_early], self.endings.token_ids[is_early]))
        if self.bad_words is not None:
            parts.append(self.bad_words.masked_tokens(token_ids, rows, num_known, output_indices))
        for row, size in self.ngram_sizes:
            masked = after_repeated_ngrams(token_ids[rows[row], : num_known[row]], size)
            parts.append(TokenEntries.concatenate([(row, masked)]))
        parts = [part for part in parts if len(part.rows)]
        if len(parts) <= 1:
            return parts[0] if parts else None
        return TokenEntries(
            np.concatenate([part.rows for part in parts]), np.concatenate([part.token_ids for part in parts])
        )

    def forced_tokens(
        self, token_ids: npt.NDArray[np.int32], rows: IntArray, num_known: IntArray, output_indices: IntArray
    ) -> TokenEntries | None:
        """The tokens that rows have to get in this step, or None; the arguments are those of `masked_tokens`."""
        forced: list[tuple[int, int]] = []
        for row, thinking in self.thinking:
            end = int(num_known[row])
            token_id = thinking.forced_token(token_ids[rows[row], end - int(output_indices[row]) : end])
            if token_id is not None:
                forced.append((row, token_id))
        if not forced:
            return None
        return TokenEntries(*(np.array(column, dtype=np.int64) for column in zip(*forced, strict=True)))


def _entries(rows: Mapping[int, RowExtras], get: Callable[[RowExtras], IntArray | None]) -> TokenEntries | None:
    parts = [(row, token_ids) for row, extras in rows.items() if (token_ids := get(extras)) is not None]
    return TokenEntries.concatenate(parts) if parts else None


def _batch_bias(rows: Mapping[int, RowExtras]) -> LogitBias | None:
    biased = [(row, extras.bias) for row, extras in rows.items() if extras.bias is not None]
    if not biased:
        return None
    entries = TokenEntries.concatenate((row, token_ids) for row, (token_ids, _) in biased)
    return LogitBias(entries, np.concatenate([values for _, (_, values) in biased]))


def _bias(logit_bias: Mapping[int, float], vocab_size: int) -> tuple[IntArray, npt.NDArray[np.float32]]:
    token_ids = _in_vocabulary(set(logit_bias), vocab_size)
    return token_ids, np.array([logit_bias[int(token_id)] for token_id in token_ids], dtype=np.float32)


def _distinct(token_ids: Sequence[int], vocab_size: int) -> IntArray:
    """The ids in the vocabulary, in their order."""
    return np.array([one for one in dict.fromkeys(token_ids) if 0 <= one < vocab_size], dtype=np.int64)


def _in_vocabulary(token_ids: set[int], vocab_size: int) -> IntArray:
    return np.array(sorted(token_id for token_id in token_ids if 0 <= token_id < vocab_size), dtype=np.int64)
