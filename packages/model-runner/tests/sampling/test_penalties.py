"""Penalties against a loop over the vocabulary."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_model_runner.sampling.penalties import TokenCounts, apply_penalties
from llmstack_model_runner.sampling.penalty_rows import PenaltyRows
from llmstack_types import SamplingParams

VOCAB_SIZE = 30
MAX_NUM_TOKENS = 200
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
PENALTY = st.tuples(st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2))
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


def params_of(penalty: Penalty) -> SamplingParams:
    repetition, frequency, presence = penalty
    return SamplingParams(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)


def assert_penalised(
    penalties: PenaltyRows, rows: list[int], known: list[int], expected: list[tuple[list[int], list[int], Penalty]]
) -> None:
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    wanted = [naive(logits[index].tolist(), *one) for index, one in enumerate(expected)]
    gathered = penalties.gather(np.array(rows), np.array(known))
    if gathered is not None:
        apply_penalties(logits, gathered)
    for actual_row, expected_row in zip(logits.tolist(), wanted, strict=True):
        assert actual_row == pytest.approx(expected_row, rel=1e-5, abs=1e-5)


@settings(deadline=None)
@given(st.lists(st.tuples(TOKENS, TOKENS, PENALTY), min_size=1, max_size=4), st.integers(0, 40))
def test_penalties_equal_a_loop_whether_counted_at_once_or_step_by_step(
    requests: list[tuple[list[int], list[int], Penalty]], num_resumed: int
) -> None:
    token_ids = np.zeros((6, MAX_NUM_TOKENS), dtype=np.int32)
    penalties = PenaltyRows(token_ids, VOCAB_SIZE)
    rows = [5 - index for index in range(len(requests))]
    for row, (prompt, output, penalty) in zip(rows, requests, strict=True):
        penalties.set_row(row, params_of((1.9, 1.0, 1.0)), np.array([*prompt, 7, 8], dtype=np.int64), len(prompt))
        known = np.array([*prompt, *output[:num_resumed]], dtype=np.int64)
        penalties.set_row(row, params_of(penalty), known, len(prompt))
    for step in range(num_resumed, 40):
        active = [(row, one[1][step]) for row, one in zip(rows, requests, strict=True) if step < len(one[1])]
        active_rows, tokens = np.array(active, dtype=np.int64).reshape(-1, 2).T
        penalties.count_tokens(active_rows, tokens)
    assert_penalised(penalties, rows, [len(prompt) + len(output) for prompt, output, _ in requests], requests)


@settings(deadline=None)
@given(TOKENS, TOKENS, TOKENS, PENALTY)
def test_each_logits_row_of_a_request_sees_the_drafts_before_it(
    prompt: list[int], output: list[int], drafts: list[int], penalty: Penalty
) -> None:
    token_ids = np.zeros((2, MAX_NUM_TOKENS), dtype=np.int32)
    known = [*prompt, *output]
    token_ids[1, : len(known) + len(drafts)] = [*known, *drafts]
    penalties = PenaltyRows(token_ids, VOCAB_SIZE)
    penalties.set_row(1, params_of(penalty), np.array(known, dtype=np.int64), len(prompt))
    counts = range(len(drafts) + 1)
    expected = [(prompt, [*output, *drafts[:count]], penalty) for count in counts]
    assert_penalised(penalties, [1] * len(counts), [len(known) + count for count in counts], expected)


def test_several_tokens_of_one_row_may_be_counted_at_once() -> None:
    counts = TokenCounts(2, VOCAB_SIZE, MAX_NUM_TOKENS)
    counts.set_row(0, np.array([4]), 1)
    counts.set_row(1, np.array([9]), 1)
    counts.add(np.array([0, 1, 0, 0]), np.array([7, 7, 7, 4]))
    entries, output_counts = counts.entries(np.array([1, 0]))
    found = dict(zip(zip(entries.rows.tolist(), entries.token_ids.tolist(), strict=True), output_counts, strict=True))
    assert found == {(0, 9): 0, (0, 7): 1, (1, 4): 1, (1, 7): 2}


def test_a_row_without_penalties_is_left_alone_after_one_that_had_some() -> None:
    penalties = PenaltyRows(np.zeros((1, 8), dtype=np.int32), VOCAB_SIZE)
    penalties.set_row(0, params_of((2.0, 0.0, 0.0)), np.array([1]), 1)
    penalties.clear_row(0)
    assert penalties.gather(np.array([0]), np.array([1])) is None
    penalties.set_row(0, SamplingParams(), np.array([1]), 1)
    penalties.count_tokens(np.array([0]), np.array([3]))
    assert penalties.gather(np.array([0]), np.array([2])) is None


def test_placeholders_of_a_prompt_are_not_counted() -> None:
    token_ids = np.zeros((1, MAX_NUM_TOKENS), dtype=np.int32)
    token_ids[0, 3] = 7
    penalties = PenaltyRows(token_ids, VOCAB_SIZE)
    known = np.array([0, 0, 0, 7], dtype=np.int64)
    penalties.set_row(0, params_of((2.0, 1.0, 1.0)), known, 3, [range(3)])
    penalty = (2.0, 1.0, 1.0)
    assert_penalised(penalties, [0], [4], [([], [7], penalty)])
    penalties.count_tokens(np.array([0]), np.array([9]))
    assert_penalised(penalties, [0], [5], [([], [7, 9], penalty)])
