"""Sampling on the device, by its reference: the distributions, masks, penalties, counts, and rows of no use."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers.sampling_rows import (
    LARGE,
    MIXED,
    distribution,
    make_logits,
    make_rows,
    make_state,
    pack_bits,
)

from llmstack_kernels.sample_tokens import MAX_ENDING_TOKENS, RowParameters, SamplingState, reference, sample_tokens

NUM_DRAWS = 4000


def draws(logits: torch.Tensor, parameters: RowParameters) -> torch.Tensor:
    """The first draws of a row that always has these logits."""
    state = SamplingState(
        torch.tensor([parameters.words()]).expand(NUM_DRAWS, -1).contiguous(), torch.arange(NUM_DRAWS)
    )
    token_ids, is_good = sample_tokens(logits.expand(NUM_DRAWS, -1), make_rows(NUM_DRAWS, "cpu"), state)
    assert is_good.all()
    return token_ids


@pytest.mark.parametrize("parameters", [*MIXED[1:], *LARGE], ids=str)
def test_draws_follow_the_distribution(parameters: RowParameters) -> None:
    logits = make_logits(1, 600)[0]
    expected = distribution(logits, parameters)
    counts = torch.bincount(draws(logits, parameters), minlength=600)
    assert not counts[expected == 0].any()
    # Tokens expected less than five times are put together; the statistic's mean is its number of classes less one.
    is_common = expected * NUM_DRAWS >= 5
    classes = torch.cat([expected[is_common], expected[~is_common].sum()[None]]) * NUM_DRAWS
    found = torch.cat([counts[is_common], counts[~is_common].sum()[None]])
    classes, found = classes[classes > 0], found[classes > 0]
    statistic = float(((found - classes) ** 2 / classes).sum())
    freedom = len(classes) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.zeros(3, 50)
    logits[0, [7, 30]] = 1.0
    logits[1, 49] = 2.0
    state = make_state([RowParameters()] * 3, "cpu")
    token_ids, is_good = sample_tokens(logits, make_rows(3, "cpu"), state, has_random=False)
    assert token_ids.tolist() == [7, 49, 0]
    assert is_good.all()


def test_a_row_counts_its_tokens_and_draws_by_their_number() -> None:
    logits = make_logits(1, 400)
    rows, state = make_rows(1, "cpu"), make_state([RowParameters(temperature=1.0, seed=9)], "cpu")
    drawn = [int(sample_tokens(logits, rows, state)[0]) for _ in range(5)]
    assert state.num_outputs.tolist() == [5, 0]
    assert len(set(drawn)) > 1
    again = make_state([RowParameters(temperature=1.0, seed=9)], "cpu", num_outputs=3)
    assert int(sample_tokens(logits, rows, again, is_counting=False)[0]) == drawn[3]
    assert again.num_outputs.tolist() == [3, 3]


def test_uniform_numbers_are_those_of_splitmix() -> None:
    """The published generator, seeded with the mixed seed, in integers of Python."""

    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        value = (value ^ value >> 27) * 0x94D049BB133111EB % (1 << 64)
        return value ^ value >> 31

    golden = 0x9E3779B97F4A7C15
    for seed, index in ((0, 0), (-1, 0), (12345, 7), (-(1 << 63), 1 << 40)):
        counter = (mix((seed + golden) % (1 << 64)) + (index + 1) * golden) % (1 << 64)
        found = reference.uniforms(torch.tensor([seed]), torch.tensor([index]))
        assert float(found) == (mix(counter) >> 11) / (1 << 53)


def test_only_tokens_whose_bit_is_set_are_chosen() -> None:
    logits = make_logits(4, 70)
    is_allowed = torch.zeros(4, 70, dtype=torch.bool)
    is_allowed[0, 69] = is_allowed[1, 31] = is_allowed[2, 32] = True
    parameters = [RowParameters(), RowParameters(temperature=1.0), RowParameters(temperature=1.0, top_p=0.5)]
    state = make_state([*parameters, RowParameters(temperature=1.0)], "cpu")
    token_ids, is_good = sample_tokens(logits, make_rows(4, "cpu"), state, bitmask=pack_bits(is_allowed))
    assert token_ids.tolist() == [69, 31, 32, 0]
    assert is_good.tolist() == [True, True, True, False]


def test_a_row_does_not_end_before_its_least_number_of_tokens() -> None:
    logits = torch.zeros(2, 40)
    logits[:, 5], logits[:, 0], logits[:, 6] = 3.0, 2.0, 1.0
    state = make_state([RowParameters(min_tokens=2, ending_token_ids=[5, 11])] * 2, "cpu", num_outputs=1)
    state.num_outputs[1] = 2
    assert sample_tokens(logits, make_rows(2, "cpu"), state)[0].tolist() == [0, 5]


def test_penalties_go_by_what_prompt_and_output_hold() -> None:
    logits = torch.tensor([[2.0, 1.9, -0.1, -0.3]])
    state = make_state([RowParameters(repetition=2.0)], "cpu", counts=torch.tensor([[1, 0, 3, 0]] * 2).int())
    rows = make_rows(1, "cpu")
    chosen = [int(sample_tokens(logits, rows, state, has_penalties=True)[0]) for _ in range(2)]
    # 2 and -0.1 are seen: they become 1 and -0.2; then 1.9 is chosen, and falls to 0.95.
    assert chosen == [1, 0]
    assert state.token_counts is not None
    assert state.token_counts.tolist() == [[3, 2, 3, 0], [1, 0, 3, 0]]


def test_frequency_counts_occurrences_and_presence_only_that_there_is_one() -> None:
    logits = torch.tensor([[3.0, 2.5, 2.0]] * 2)
    parameters = [RowParameters(frequency=0.4), RowParameters(presence=0.6)]
    # Of token 0: generated twice; token 1: in the prompt alone.
    state = make_state(parameters, "cpu", counts=torch.tensor([[4, 1, 0]] * 3).int())
    assert sample_tokens(logits, make_rows(2, "cpu"), state, has_penalties=True)[0].tolist() == [1, 1]
    state = make_state(parameters, "cpu", counts=torch.tensor([[2, 1, 0]] * 3).int())
    assert sample_tokens(logits, make_rows(2, "cpu"), state, has_penalties=True)[0].tolist() == [0, 1]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_of_bad_logits_is_reported_and_changes_no_other(value: float) -> None:
    logits = make_logits(3, 100)
    expected = sample_tokens(logits, make_rows(3, "cpu"), make_state(MIXED[1:4], "cpu"))[0]
    logits[1, 50] = value
    token_ids, is_good = sample_tokens(logits, make_rows(3, "cpu"), make_state(MIXED[1:4], "cpu"))
    assert is_good.tolist() == [True, False, True]
    assert token_ids.tolist() == [int(expected[0]), 0, int(expected[2])]


def test_what_does_not_fit_is_refused() -> None:
    logits, rows, state = make_logits(2, 64), make_rows(2, "cpu"), make_state(MIXED[:2], "cpu")
    with pytest.raises(ValueError, match=r"rows must be int32 \[2\]"):
        sample_tokens(logits, rows.long(), state)
    with pytest.raises(ValueError, match=r"bitmask must be int32 \[2, 2\]"):
        sample_tokens(logits, rows, state, bitmask=torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="token_counts"):
        sample_tokens(logits, rows, state, has_penalties=True)
    with pytest.raises(ValueError, match="ending tokens"):
        RowParameters(ending_token_ids=range(MAX_ENDING_TOKENS + 1)).words()
