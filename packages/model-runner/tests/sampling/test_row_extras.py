"""Bad words, `min_tokens` and the other extras of few rows, against a loop over requests."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runner_helpers.sampling_rows import make_sampling_rows

from llmstack_model_runner.sampling import Sampler
from llmstack_model_runner.sampling.row_extras import AllowedTokens
from llmstack_types import SamplingParams

VOCAB_SIZE = 8
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8)
SEQUENCES = st.lists(st.lists(st.integers(0, VOCAB_SIZE + 1), min_size=1, max_size=4).map(tuple), max_size=5).map(tuple)
EOS = 6


def masked(sequences: tuple[tuple[int, ...], ...], output: list[int]) -> set[int]:
    ends = {
        one[-1]
        for one in sequences
        if len(one) - 1 <= len(output) and output[len(output) - len(one) + 1 :] == [*one[:-1]]
    }
    possible = {one[-1] for one in sequences if max(one) < VOCAB_SIZE}
    return ends & possible


def masked_by_sampler(
    rows: object, num_logits: int, output_indices: list[int], row_indices: list[int]
) -> list[set[int]]:
    logits = torch.zeros(num_logits, VOCAB_SIZE)
    Sampler().sample(logits, rows.metadata(np.array(row_indices), np.array(output_indices)))  # type: ignore[attr-defined]  # the rows
    return [set(row.isneginf().nonzero().flatten().tolist()) for row in logits]


REQUEST = st.tuples(SEQUENCES, TOKENS, TOKENS, st.integers(0, 6))


def test_a_row_that_may_have_only_tokens_of_no_vocabulary_gets_none() -> None:
    params = [SamplingParams(temperature=0.0, allowed_token_ids=ids) for ids in ([VOCAB_SIZE], [2, VOCAB_SIZE])]
    rows = make_sampling_rows(params, [[1], [1]], VOCAB_SIZE, num_prompt_tokens=1, eos_token_ids=(EOS,))
    sampled = Sampler().sample(torch.zeros(2, VOCAB_SIZE), rows.metadata(np.array([0, 1]), np.array([0, 0])))
    assert sampled.is_good.tolist() == [False, True]
    assert sampled.token_ids.tolist()[1] == 2


@settings(deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=4))
def test_bad_words_and_min_tokens_mask_what_a_loop_over_requests_masks(
    requests: list[tuple[tuple[tuple[int, ...], ...], list[int], list[int], int]],
) -> None:
    params = [
        SamplingParams(temperature=0.0, bad_words_token_ids=one[0], min_tokens=one[3], stop_token_ids=[3])
        for one in requests
    ]
    # All prompts have one length, so that one number says where the outputs begin.
    tokens = [[0] * (8 - len(prompt)) + prompt + output for _, prompt, output, _ in requests]
    rows = make_sampling_rows(params, tokens, VOCAB_SIZE, num_prompt_tokens=8, eos_token_ids=(EOS,))
    order = list(range(len(requests)))[::-1]
    found = masked_by_sampler(rows, len(requests), [len(requests[row][2]) for row in order], order)
    for actual, (sequences, _, output, min_tokens) in zip(found, [requests[row] for row in order], strict=True):
        possible = tuple(one for one in sequences if max(one) < VOCAB_SIZE)
        assert actual == masked(possible, output) | ({3, EOS} if len(output) < min_tokens else set())


@settings(deadline=None)
@given(SEQUENCES, TOKENS, TOKENS)
def test_drafts_count_as_generated_for_the_logits_behind_them(
    sequences: tuple[tuple[int, ...], ...], output: list[int], drafts: list[int]
) -> None:
    params = [SamplingParams(temperature=0.0, bad_words_token_ids=sequences)]
    rows = make_sampling_rows(params, [[0, *output]], VOCAB_SIZE, drafts=[drafts])
    indices = [len(output) + count for count in range(len(drafts) + 1)]
    found = masked_by_sampler(rows, len(indices), indices, [0] * len(indices))
    possible = tuple(one for one in sequences if max(one) < VOCAB_SIZE)
    assert found == [masked(possible, [*output, *drafts[:count]]) for count in range(len(drafts) + 1)]


def test_the_prompt_may_hold_the_beginning_of_a_bad_word() -> None:
    params = [SamplingParams(temperature=0.0, bad_words_token_ids=((1, 2),))]
    rows = make_sampling_rows(params, [[1]], VOCAB_SIZE)
    assert masked_by_sampler(rows, 1, [0], [0]) == [set()]


def test_what_was_gathered_for_a_batch_is_forgotten_when_a_request_changes() -> None:
    params = [SamplingParams(temperature=0.0, allowed_token_ids=[1]), SamplingParams(temperature=0.0)]
    rows = make_sampling_rows(params, [[0], [0]], VOCAB_SIZE)
    everything = set(range(VOCAB_SIZE))
    for _ in range(2):
        assert masked_by_sampler(rows, 2, [0, 0], [0, 1]) == [everything - {1}, set()]
    assert masked_by_sampler(rows, 2, [0, 0], [1, 0]) == [set(), everything - {1}]
    rows.clear_row(0)
    rows.set_row(0, SamplingParams(temperature=0.0, allowed_token_ids=[2, 3]), np.array([0]), 1)
    assert masked_by_sampler(rows, 2, [0, 0], [1, 0]) == [set(), everything - {2, 3}]
    rows.clear_row(0)
    assert masked_by_sampler(rows, 2, [0, 0], [1, 0]) == [set(), set()]


def test_beams_share_the_array_of_their_allowed_tokens() -> None:
    given, others = (7, 2, 2, 5, VOCAB_SIZE), [(1, 3), (4,)]
    tokens = AllowedTokens(VOCAB_SIZE)
    first = tokens.array(given)
    assert first.tolist() == [2, 5, 7]
    assert tokens.array(given) is first  # that of the next step's rows
    assert [tokens.array(one).tolist() for one in others] == [[1, 3], [4]]
    again = tokens.array(given)
    assert again is not first  # few are kept
    assert again.tolist() == [2, 5, 7]
    changing = [1, 2]
    assert tokens.array(changing).tolist() == [1, 2]
    changing.append(3)
    assert tokens.array(changing).tolist() == [1, 2, 3]
