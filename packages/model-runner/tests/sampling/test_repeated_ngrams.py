"""`no_repeat_ngram_size` masks what transformers masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_runner_helpers.sampling_rows import make_sampling_rows
from transformers import NoRepeatNGramLogitsProcessor

from llmstack_model_runner.sampling import Sampler, repeated_ngrams
from llmstack_model_runner.sampling.repeated_ngrams import after_repeated_ngrams
from llmstack_types import SamplingParams

VOCAB_SIZE = 6
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)


def banned_by_transformers(token_ids: list[int], size: int) -> list[int]:
    scores = NoRepeatNGramLogitsProcessor(size)(torch.tensor([token_ids]), torch.zeros(1, VOCAB_SIZE))
    return scores[0].isneginf().nonzero().flatten().tolist()


@settings(deadline=None)
@given(TOKENS, st.integers(1, 5))
@example([1, 2, 1], 2)
@example([1], 1)
@example([1, 1, 1], 3)
def test_the_tokens_are_those_of_transformers(token_ids: list[int], size: int) -> None:
    found = after_repeated_ngrams(np.array(token_ids, dtype=np.int32), size)
    assert found.tolist() == banned_by_transformers(token_ids, size)


@settings(deadline=None)
@given(TOKENS, st.integers(1, 5))
@example([1, 2, 5, 2, 1, 3, 1, 2], 3)
def test_sequences_of_one_digest_are_distinguished(token_ids: list[int], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated_ngrams, "_BASE", np.uint64(1))  # digests are sums then
        found = after_repeated_ngrams(np.array(token_ids, dtype=np.int32), size)
    assert found.tolist() == banned_by_transformers(token_ids, size)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3), st.integers(1, 9), st.integers(2, 12))
def test_texts_of_any_tokens_that_repeat_are_found(period: list[int], times: int, size: int) -> None:
    token_ids = np.array(period * times, dtype=np.int32)
    tails = [tuple(token_ids[start : start + size].tolist()) for start in range(len(token_ids) - size + 1)]
    last = tuple(token_ids[len(token_ids) - size + 1 :].tolist()) if len(token_ids) >= size else None
    assert after_repeated_ngrams(token_ids, size).tolist() == sorted({one[-1] for one in tails if one[:-1] == last})


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=8, max_size=8), st.integers(0, 4)), min_size=1, max_size=4)
)
def test_each_row_is_masked_by_its_own_tokens_and_size(requests: list[tuple[list[int], int]]) -> None:
    params = [SamplingParams(temperature=0.0, no_repeat_ngram_size=size) for _, size in requests]
    rows = make_sampling_rows(params, [tokens for tokens, _ in requests], VOCAB_SIZE, num_prompt_tokens=3)
    logits, indices = torch.zeros(len(requests), VOCAB_SIZE), np.arange(len(requests))
    Sampler().sample(logits, rows.metadata(indices, np.full(len(requests), 5)))
    masked = [row.isneginf().nonzero().flatten().tolist() for row in logits]
    assert masked == [banned_by_transformers(tokens, size) if size else [] for tokens, size in requests]
