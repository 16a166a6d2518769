"""The sets that tokens are drawn from are those of transformers, and the draws follow their distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from model_runner_helpers.sampling_rows import make_sampling_rows
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from llmstack_model_runner.sampling import RandomRows, Sampler, target_probabilities
from llmstack_model_runner.sampling.draws import draw, draw_in_groups
from llmstack_types import SamplingParams

Warper = Callable[[Any, torch.Tensor], torch.Tensor]


def probabilities(logits: torch.Tensor, params: SamplingParams, token_ids: list[int] | None = None) -> torch.Tensor:
    rows = make_sampling_rows([params] * len(logits), [token_ids or [0]] * len(logits), logits.shape[-1])
    count = np.full(len(logits), len(token_ids or [0]) - 1)
    return target_probabilities(logits, rows.metadata(np.arange(len(logits)), count))


def warped(logits: torch.Tensor, *warpers: Warper) -> torch.Tensor:
    for warper in warpers:
        logits = warper(None, logits)
    return logits.softmax(dim=-1)


LOGITS = st.tuples(st.integers(2, 400), st.integers(0, 10_000), st.sampled_from([0.3, 1.0, 4.0])).map(
    lambda case: torch.randn(2, case[0], generator=torch.Generator().manual_seed(case[1])) * case[2]
)
SHARE = st.sampled_from([0.1, 0.35, 0.6, 0.85, 0.95, 0.99])


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert [row.nonzero().flatten().tolist() for row in actual] == [
        row.nonzero().flatten().tolist() for row in expected
    ]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-7)


@settings(deadline=None)
@given(LOGITS, st.integers(1, 450), st.sampled_from([0.5, 1.0, 1.6]))
def test_top_k_keeps_what_transformers_keeps(logits: torch.Tensor, top_k: int, temperature: float) -> None:
    expected = warped(logits, TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k))
    assert_equal(probabilities(logits, SamplingParams(top_k=top_k, temperature=temperature)), expected)


@settings(deadline=None)
@given(LOGITS, SHARE, st.sampled_from([0.5, 1.0, 1.6]))
def test_top_p_keeps_what_transformers_keeps(logits: torch.Tensor, top_p: float, temperature: float) -> None:
    expected = warped(logits, TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p))
    assert_equal(probabilities(logits, SamplingParams(top_p=top_p, temperature=temperature)), expected)


@settings(deadline=None)
@given(LOGITS, st.sampled_from([0.001, 0.02, 0.1, 0.5, 1.0]), st.sampled_from([0.5, 1.0, 1.6]))
def test_min_p_keeps_what_transformers_keeps(logits: torch.Tensor, min_p: float, temperature: float) -> None:
    expected = warped(logits, TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p))
    assert_equal(probabilities(logits, SamplingParams(min_p=min_p, temperature=temperature)), expected)


def assume_a_clear_cut(logits: torch.Tensor, typical_p: float) -> None:
    """Leaves out rows whose typical set depends on the rounding of float32."""
    log_p = logits.double().log_softmax(dim=-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(dim=-1, keepdim=True)
    distance, order = (-log_p - entropy).abs().sort(dim=-1)
    mass = p.gather(-1, order).cumsum(dim=-1)
    cut = (mass < typical_p).sum(dim=-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    gap = distance.gather(-1, (cut + 1).clamp(max=logits.shape[-1] - 1)) - distance.gather(-1, cut)
    is_last = cut == logits.shape[-1] - 1
    assume(bool(((gap > 1e-5) | is_last).all() and ((mass - typical_p).abs() > 1e-5).all()))


@settings(deadline=None)
@given(LOGITS, SHARE, st.sampled_from([0.5, 1.0, 1.6]))
def test_typical_p_keeps_what_transformers_keeps(logits: torch.Tensor, typical_p: float, temperature: float) -> None:
    assume_a_clear_cut(logits / temperature, typical_p)
    expected = warped(logits, TemperatureLogitsWarper(temperature), TypicalLogitsWarper(typical_p))
    assert_equal(probabilities(logits, SamplingParams(typical_p=typical_p, temperature=temperature)), expected)


@settings(deadline=None)
@given(LOGITS, SHARE, SHARE, st.integers(1, 300), st.sampled_from([0.0, 0.01]))
def test_the_sets_apply_in_the_documented_order(
    logits: torch.Tensor, typical_p: float, top_p: float, top_k: int, min_p: float
) -> None:
    params = SamplingParams(temperature=0.8, typical_p=typical_p, top_p=top_p, top_k=top_k, min_p=min_p)
    warpers: list[Warper] = [TemperatureLogitsWarper(0.8), *([MinPLogitsWarper(min_p)] if min_p else [])]
    filtered = logits
    for warper in warpers:
        filtered = warper(None, filtered)
    assume_a_clear_cut(filtered, typical_p)
    warpers += [TypicalLogitsWarper(typical_p), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)]
    assert_equal(probabilities(logits, params), warped(logits, *warpers))


def test_of_equally_typical_tokens_the_lowest_ids_are_kept() -> None:
    found = probabilities(torch.zeros(1, 10), SamplingParams(typical_p=0.35))
    assert found[0].nonzero().flatten().tolist() == [0, 1, 2, 3]


NUM_DRAWS = 10_000
NUM_TOKENS = 20


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=11),
        SamplingParams(seed=12, temperature=0.7),
        SamplingParams(seed=13, temperature=1.8),
        SamplingParams(seed=14, top_k=10),
        SamplingParams(seed=15, top_p=0.8),
        SamplingParams(seed=16, min_p=0.2),
        SamplingParams(seed=17, typical_p=0.7),
        SamplingParams(seed=18, top_k=12, top_p=0.9, min_p=0.05),
        SamplingParams(seed=19, typical_p=0.9, top_p=0.9, temperature=1.3),
        SamplingParams(seed=20, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=-0.4),
        SamplingParams(seed=21, logit_bias={3: 1.0, 5: -2.0}, bad_words_token_ids=((7,),)),
        SamplingParams(seed=22, allowed_token_ids=[1, 2, 8, 15, 300], top_p=0.95),
    ],
    ids=lambda params: f"seed {params.seed}",
)
@pytest.mark.parametrize("vocab_size", [NUM_TOKENS, 700], ids=["small", "large"])
def test_draws_follow_the_distribution(params: SamplingParams, vocab_size: int) -> None:
    """Chi-square over 10,000 output indices at one fixed seed."""
    logits = torch.full((1, vocab_size), -torch.inf)
    logits[0, :NUM_TOKENS] = torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(5))
    token_ids = [0, 2, 5, 5, 9]
    expected = NUM_DRAWS * probabilities(logits, params, token_ids)[0].double()
    rows = make_sampling_rows([params] * NUM_DRAWS, [token_ids] * NUM_DRAWS, vocab_size)
    metadata = rows.metadata(np.arange(NUM_DRAWS), np.full(NUM_DRAWS, 4))
    metadata.random.output_indices[:] = np.arange(NUM_DRAWS)  # type: ignore[union-attr]  # all rows are random
    drawn = Sampler().sample(logits.repeat(NUM_DRAWS, 1), metadata).token_ids
    counts = torch.bincount(drawn, minlength=vocab_size).double()
    assert not counts[expected == 0].any()
    likely = expected > 0
    statistic = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    num_degrees = int(likely.sum()) - 1
    # The quantile of one in a thousand, by Wilson and Hilferty.
    limit = num_degrees * (1 - 2 / (9 * num_degrees) + 3.09 * (2 / (9 * num_degrees)) ** 0.5) ** 3
    assert statistic < limit


@settings(deadline=None)
@given(LOGITS, st.sampled_from([1, 20, 256, 300, 1000]), st.sampled_from([0.2, 0.9, 0.999, 1.0]), st.integers(0, 9))
def test_kernels_and_groups_draw_the_same_tokens(logits: torch.Tensor, top_k: int, top_p: float, seed: int) -> None:
    """Rows in any order of ways: the whole vocabulary, candidates, a nucleus; ties as bfloat16 has them."""
    logits = logits.bfloat16().float().repeat(8, 1)
    num_rows, vocab_size = logits.shape
    random = RandomRows(
        rows=np.arange(num_rows),
        temperature=np.full(num_rows, 0.7, dtype=np.float32),
        top_k=np.where(np.arange(num_rows) % 3, vocab_size, min(top_k, vocab_size)),
        top_p=np.where(np.arange(num_rows) % 2, 1.0, top_p),
        min_p=np.where(np.arange(num_rows) % 5, 0.0, 0.01).astype(np.float32),
        typical_p=np.ones(num_rows),
        top_n_sigma=np.full(num_rows, -1.0),
        infill_rules=np.full(num_rows, None, dtype=np.object_),
        seeds=np.arange(num_rows, dtype=np.uint64) + np.uint64(100 * seed),
        output_indices=np.arange(num_rows),
    )
    best = logits.amax(dim=-1)
    assert draw(logits, best, random).tolist() == draw_in_groups(logits, best, random).tolist()
