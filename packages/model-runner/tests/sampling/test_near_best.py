"""Top-n-sigma."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runner_helpers.sampling_rows import make_sampling_rows

from llmstack_model_runner.sampling import Sampler
from llmstack_model_runner.sampling.near_best import near_best_mask
from llmstack_model_runner.sampling.sampler import target_probabilities
from llmstack_types import SamplingParams


def of_llama_cpp(logits: list[float], num_sigmas: float) -> list[bool]:
    """`llama_sampler_top_n_sigma_impl`, in Python's arithmetic."""
    finite = [logit for logit in logits if logit > -math.inf]
    mean = math.fsum(finite) / len(finite)
    sigma = math.sqrt(math.fsum((logit - mean) ** 2 for logit in finite) / len(finite))
    return [logit > -math.inf and logit >= max(finite) - num_sigmas * sigma for logit in logits]


LOGIT = st.integers(-80, 80).map(lambda number: number / 4) | st.just(-math.inf)
ROWS = st.lists(st.lists(LOGIT, min_size=7, max_size=7), min_size=1, max_size=4)


@settings(deadline=None)
@given(ROWS, st.sampled_from([0.013, 0.51, 1.003, 2.507]), st.sampled_from([0.0, 4096.0]))
def test_it_keeps_what_llama_cpp_keeps(rows: list[list[float]], num_sigmas: float, offset: float) -> None:
    rows = [[0.0, *row] for row in rows]  # one token is allowed
    logits = torch.tensor(rows) + offset
    best = logits.amax(dim=-1, keepdim=True)
    mask = near_best_mask(logits, best, torch.full((len(rows),), num_sigmas).double())
    assert mask.tolist() == [of_llama_cpp(row, num_sigmas) for row in rows]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_only_tokens_near_the_best_one_are_drawn(temperature: float) -> None:
    logits = torch.tensor([[4.0, 3.5, 1.0, 0.0, -2.0]])
    params = SamplingParams(temperature=temperature, top_n_sigma=0.5)
    metadata = make_sampling_rows([params], [[1]], 5).metadata(np.array([0]), np.array([0]))
    chances = target_probabilities(logits, metadata)[0]
    kept = (logits[0] / temperature).softmax(dim=-1)[:2]
    torch.testing.assert_close(chances, torch.cat([kept / kept.sum(), torch.zeros(3)]))
    drawn = set()
    for seed in range(40):
        rows = make_sampling_rows([SamplingParams(temperature=2.0, top_n_sigma=0.5, seed=seed)], [[1]], 5)
        drawn |= set(Sampler().sample(logits, rows.metadata(np.array([0]), np.array([0]))).token_ids.tolist())
    assert drawn == {0, 1}


@pytest.mark.parametrize("off", [0.0, -1.0])
def test_zero_and_less_keep_everything(off: float) -> None:
    rows = make_sampling_rows([SamplingParams(temperature=1.0, top_n_sigma=off)], [[1]], 9)
    logits = torch.randn(1, 9)
    chances = target_probabilities(logits, rows.metadata(np.array([0]), np.array([0])))
    torch.testing.assert_close(chances, logits.softmax(dim=-1))
