"""The sampler: order of its stages, seeds, greedy ties, and rows that do not disturb each other."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runner_helpers.sampling_rows import make_sampling_rows

from llmstack_model_runner.sampling import ALL_MASKED, Sampler, SamplerOutput
from llmstack_types import SamplingParams
from llmstack_types.engine_core import MIN_LOGPROB

VOCAB_SIZE = 600


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    *,
    tokens: list[list[int]] | None = None,
    num_prompt_tokens: int = 1,
    output_index: int | None = None,
    eos: tuple[int, ...] = (),
) -> SamplerOutput:
    """Samples with each row's tokens, prompt first; the output index is what they imply unless given."""
    tokens = tokens or [[0]] * len(params)
    rows = make_sampling_rows(params, tokens, logits.shape[-1], num_prompt_tokens=num_prompt_tokens, eos_token_ids=eos)
    indices = [len(row_tokens) - num_prompt_tokens if output_index is None else output_index for row_tokens in tokens]
    return Sampler().sample(logits.clone(), rows.metadata(np.arange(len(params)), np.array(indices)))


def random_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 5, 300, 599, 600, 10_000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 5),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([None, {3: 4.0}]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 3))
def test_a_row_samples_the_same_alone_and_among_any_neighbours(params: list[SamplingParams], index: int) -> None:
    logits = random_logits(len(params), scale=1.0).bfloat16().float()
    together = sample(logits, params, output_index=index)
    alone = [sample(logits[i : i + 1], [one], output_index=index) for i, one in enumerate(params)]
    assert together.token_ids.tolist() == [int(one.token_ids) for one in alone]
    if together.logprobs is not None:
        entries = [entry for one in alone if one.logprobs is not None for entry in one.logprobs.to_lists()]
        assert together.logprobs.to_lists() == entries


@settings(max_examples=60, deadline=None)
@given(PARAMS.filter(lambda params: not params.is_greedy), st.integers(0, 10_000))
def test_only_tokens_of_the_reference_set_are_drawn(params: SamplingParams, seed: int) -> None:
    logits = random_logits(1, seed=seed)
    token_id = int(sample(logits, [replace(params, seed=seed)]).token_ids)
    values = logits[0].double()
    if params.logit_bias:
        values[3] += 4.0
    values[0] = values[0] / params.repetition_penalty if values[0] > 0 else values[0] * params.repetition_penalty
    weights = ((values - values.max()) / max(params.temperature, 1e-37)).exp()
    weights[weights < params.min_p] = 0.0
    order = weights.sort(descending=True, stable=True).indices[: params.top_k if params.top_k > 0 else None]
    total = weights[order].sum()
    before = weights[order].cumsum(0) - weights[order]
    # A little slack: the reference sums in another order.
    allowed = order[(before < params.top_p * total + 1e-6) & (weights[order] > 0)]
    assert token_id in allowed.tolist()


def test_greedy_takes_the_lowest_id_of_equal_maxima() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, [400, 17, 300]] = 5.0
    assert sample(logits, [SamplingParams(temperature=0.0)] * 2).token_ids.tolist() == [17, 0]


@pytest.mark.parametrize(
    "params", [SamplingParams(seed=1), SamplingParams(seed=1, top_k=6), SamplingParams(seed=1, top_p=0.999999)]
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 20,000 draws at one fixed seed, for each of the ways a token is drawn."""
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.07, 0.03])
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 100:106] = probabilities.log()
    num_draws = 20_000
    rows = make_sampling_rows([params], [[0]], 300)
    metadata = rows.metadata(np.zeros(num_draws, dtype=np.int64), np.arange(num_draws))
    token_ids = Sampler().sample(logits.expand(num_draws, -1), metadata).token_ids
    counts = torch.bincount(token_ids - 100, minlength=6)
    expected = probabilities * num_draws
    # 5 degrees of freedom: 20.5 is exceeded once in a thousand seeds.
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5


def test_top_p_draws_from_a_nucleus_larger_than_the_candidates() -> None:
    logits = torch.zeros(1, 2000)
    drawn = {int(sample(logits, [SamplingParams(seed=s, top_p=0.5)]).token_ids) for s in range(200)}
    assert max(drawn) < 1000  # Of equal weights the lower ids make up the set.
    assert len(drawn) > 150


def test_equal_seeds_repeat_and_output_indices_differ() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    params = [SamplingParams(seed=42)]
    draws = [int(sample(logits, params, output_index=index).token_ids) for index in range(20)]
    assert draws == [int(sample(logits, params, output_index=index).token_ids) for index in range(20)]
    assert len(set(draws)) > 15


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-20, 1e-6])
def test_tiny_temperatures_equal_greedy(temperature: float) -> None:
    logits = random_logits(1)
    output = sample(logits, [SamplingParams(temperature=temperature, seed=0)])
    assert output.token_ids.tolist() == logits.argmax(dim=-1).tolist()
    assert output.is_good.tolist() == [True]


def test_a_row_that_is_not_a_number_fails_alone() -> None:
    logits = random_logits(6)
    clean = logits.clone()
    logits[1, 7] = torch.nan
    logits[2, 7] = torch.inf
    logits[3] = torch.nan
    params = [SamplingParams(seed=3, top_p=0.9, logprobs=1)] * 6
    output = sample(logits, params)
    expected = sample(clean, params)
    assert output.is_good.tolist() == [True, False, False, False, True, True]
    for row in (0, 4, 5):
        assert int(output.token_ids[row]) == int(expected.token_ids[row])
    assert output.logprobs is not None
    assert not any(math.isnan(value) for entry in output.logprobs.to_lists() for value in entry.logprobs)


def test_a_row_without_an_allowed_token_fails_alone() -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=[5], min_tokens=2)
    output = sample(random_logits(2), [params, SamplingParams(temperature=0.0)], eos=(5,))
    assert output.is_good.tolist() == [False, True]
    assert output.token_ids[0] == ALL_MASKED


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_masks_leave_a_row_without_a_token(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=0, allowed_token_ids=[5], min_tokens=2, logprobs=1)
    logits = random_logits(3)
    logits[1, 9], logits[2] = torch.nan, -torch.inf
    output = sample(logits, [params] * 3, eos=(5,))
    assert output.is_good.tolist() == [False] * 3
    assert (output.token_ids == ALL_MASKED).tolist() == [True, False, False]


def test_masks_cannot_hide_that_logits_are_not_numbers() -> None:
    logits = random_logits(1)
    logits[0, 9] = torch.nan
    output = sample(logits, [SamplingParams(temperature=0.0, allowed_token_ids=[1, 2])])
    assert output.is_good.tolist() == [False]


def test_allowed_tokens_are_the_only_ones() -> None:
    logits = random_logits(50)
    params = [SamplingParams(seed=s, temperature=2.0, allowed_token_ids=[4, 8]) for s in range(50)]
    assert set(sample(logits, params).token_ids.tolist()) == {4, 8}


def test_bias_moves_the_choice_and_not_the_logprobs() -> None:
    logits = random_logits(1)
    output = sample(logits, [SamplingParams(temperature=0.0, logit_bias={11: 100.0}, logprobs=0)])
    assert output.token_ids.tolist() == [11]
    assert output.logprobs is not None
    assert float(output.logprobs.chosen_logprobs) == pytest.approx(float(logits.log_softmax(-1)[0, 11]))


def test_end_and_stop_tokens_are_masked_until_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 5], logits[0, 6], logits[0, 7] = 30.0, 20.0, 10.0
    params = [SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[6, 10**6])]
    assert [int(sample(logits, params, output_index=index, eos=(5,)).token_ids) for index in range(4)] == [7, 7, 5, 5]


def test_logprobs_are_raw_even_though_the_logits_are_overwritten() -> None:
    logits = random_logits(2)
    params = [SamplingParams(seed=1, repetition_penalty=2.0, logit_bias={1: 5.0}, top_p=0.5, logprobs=2)] * 2
    output = sample(logits, params)
    assert output.logprobs is not None
    raw = logits.log_softmax(dim=-1).gather(-1, output.token_ids[:, None]).squeeze(-1)
    assert torch.allclose(output.logprobs.chosen_logprobs, raw)


def test_penalties_come_before_temperature_and_the_sets() -> None:
    """A presence penalty of 2 at temperature 4 shifts by 2, not by 8: penalised first, then divided."""
    logits = torch.full((1, 10), -torch.inf)
    logits[0, 1], logits[0, 2] = 3.0, 0.9
    params = SamplingParams(temperature=4.0, presence_penalty=2.0, top_k=1, seed=0)
    assert int(sample(logits, [params], tokens=[[0, 1]]).token_ids) == 1  # 3 - 2 > 0.9


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_beam_reports_the_log_probabilities_of_the_tokens_that_it_may_get(mode: str) -> None:
    logits = random_logits(3, vocab_size=9)
    allowed = (1, 4, 5)
    beam = SamplingParams(
        temperature=0.0, use_beam_search=True, logprobs=4, allowed_token_ids=allowed, repetition_penalty=2.0
    )
    params = [SamplingParams(temperature=0.0, logprobs=2), beam, SamplingParams(temperature=0.0)]
    rows = make_sampling_rows(params, [[4]] * 3, 9, num_prompt_tokens=1, eos_token_ids=())
    output = Sampler(mode).sample(logits.clone(), rows.metadata(np.arange(3), np.zeros(3, dtype=np.int64)))
    assert output.logprobs is not None
    plain, changed = output.logprobs.to_lists()
    full = logits.log_softmax(-1)
    assert plain.token_ids[1:] == tuple(full[0].topk(2).indices.tolist())
    assert plain.logprobs[1:] == pytest.approx(full[0].topk(2).values.tolist())
    wanted = {token: float(full[1, token]) * (2.0 if token == 4 else 1.0) for token in allowed}
    best = sorted(allowed, key=lambda token: -wanted[token])
    assert list(changed.token_ids[:4]) == [best[0], *best]
    assert list(changed.logprobs[1:4]) == pytest.approx([wanted[token] for token in best])
    assert changed.logprobs[4] == MIN_LOGPROB
