"""Sampling rows for tests of the sampler, without an input batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmstack_model_runner.sampling.infill import TokenTexts
from llmstack_model_runner.sampling.logits_processor import LogitsProcessors
from llmstack_model_runner.sampling.rows import SamplingRows
from llmstack_types import SamplingParams

_NUM_SPARE_TOKENS = 16


class NumberTexts(TokenTexts):
    """The text of a token is its number."""

    def __init__(self) -> None:
        super().__init__("")

    def text_of(self, token_id: int) -> bytes:
        return str(token_id).encode()


def make_sampling_rows(
    params: Sequence[SamplingParams],
    token_ids: Sequence[Sequence[int]],
    vocab_size: int,
    *,
    num_prompt_tokens: int = 1,
    eos_token_ids: tuple[int, ...] = (),
    drafts: Sequence[Sequence[int]] = (),
    processors: LogitsProcessors | None = None,
) -> SamplingRows:
    """Row i has `params[i]` and `token_ids[i]`, prompt first; `drafts[i]` lie behind them in the array of tokens.

    The text of a token is its number.
    """
    width = max(map(len, token_ids)) + max(map(len, drafts), default=0) + _NUM_SPARE_TOKENS
    all_token_ids = np.zeros((len(params), width), dtype=np.int32)
    rows = SamplingRows(all_token_ids, vocab_size, processors)
    rows.texts = NumberTexts()
    for row, (one, known) in enumerate(zip(params, token_ids, strict=True)):
        tokens = [*known, *(drafts[row] if drafts else ())]
        all_token_ids[row, : len(tokens)] = tokens
        rows.set_row(row, one, np.array(known, dtype=np.int64), num_prompt_tokens, eos_token_ids)
    return rows
