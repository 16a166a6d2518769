"""The written-out distributions are those that the sampler draws from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_runner_helpers.sampling_rows import make_sampling_rows

from llmstack_model_runner.sampling import Sampler, target_probabilities
from llmstack_types import SamplingParams

VOCAB_SIZE = 400
NUM_DRAWS = 4000


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, seed=1),
        SamplingParams(seed=1, top_k=20, top_p=0.8),
        SamplingParams(seed=1, top_k=300, top_p=0.9),
        SamplingParams(seed=1, top_p=0.7, min_p=0.01),
        SamplingParams(seed=1, logit_bias={7: 4.0}, bad_words_token_ids=((8,),)),
        SamplingParams(seed=1, typical_p=0.6),
        SamplingParams(seed=1, typical_p=0.9, top_k=30, min_p=0.001),
    ],
)
def test_draws_follow_the_probabilities_written_out(params: SamplingParams) -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    rows = make_sampling_rows([params], [[3, 5]], VOCAB_SIZE, num_prompt_tokens=2)
    metadata = rows.metadata(np.zeros(NUM_DRAWS, dtype=np.int64), np.arange(NUM_DRAWS))
    drawn = Sampler().sample(logits.repeat(NUM_DRAWS, 1), metadata).token_ids
    one = rows.metadata(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    probabilities = target_probabilities(logits, one)[0].double()
    assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-6)
    counts = torch.bincount(drawn, minlength=VOCAB_SIZE)
    assert not counts[probabilities == 0].any()
    expected = probabilities * NUM_DRAWS
    is_frequent = expected >= 5  # The usual rule for chi-square.
    statistic = float(((counts - expected)[is_frequent] ** 2 / expected[is_frequent]).sum())
    num_degrees = int(is_frequent.sum())
    assert statistic < num_degrees + 4 * (2 * num_degrees) ** 0.5
