"""Penalties against a loop over the vocabulary."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_model_runner.sampling.penalties import PenaltyRow, TokenCounts, apply_penalties

VOCAB_SIZE = 30
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40)


Penalty = tuple[float, float, float]


def naive(logits: list[float], prompt: list[int], output: list[int], penalty: Penalty) -> list[float]:
    repetition, frequency, presence = penalty
    counts = Counter(output)
    result = list(logits)
    for token_id in range(len(result)):
        if token_id in prompt or token_id in output:
            result[token_id] = result[token_id] / repetition if result[token_id] > 0 else result[token_id] * repetition
        result[token_id] -= frequency * counts[token_id] + presence * (counts[token_id] > 0)
    return result


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(TOKENS, TOKENS, st.tuples(st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2))),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_penalties_equal_a_loop_whether_counted_at_once_or_token_by_token(
    rows: list[tuple[list[int], list[int], tuple[float, float, float]]], is_resumed: bool
) -> None:
    logits = torch.randn(len(rows) + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    penalties = []
    for row, (prompt, output, penalty) in enumerate(rows):
        if is_resumed:
            counts = TokenCounts(np.array(prompt + output), len(prompt))
        else:
            counts = TokenCounts(np.array(prompt), len(prompt))
            for token_id in output:
                counts.add(token_id)
        penalties.append(PenaltyRow(row, counts, *penalty))
    expected = [naive(logits[row].tolist(), *rows[row]) for row in range(len(rows))] + [logits[-1].tolist()]
    apply_penalties(logits, penalties)
    for actual_row, expected_row in zip(logits.tolist(), expected, strict=True):
        assert actual_row == pytest.approx(expected_row, rel=1e-5, abs=1e-5)


def test_counts_grow_beyond_their_first_capacity() -> None:
    counts = TokenCounts(np.array([0]), 1)
    for token_id in range(1000):
        counts.add(token_id)
    assert sorted(counts.token_ids.tolist()) == list(range(1000))
    assert counts.output_counts.sum() == 1000
