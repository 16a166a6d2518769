"""Sampling 32 rows of GPT-2's vocabulary, by what the rows ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmstack_model_runner.sampling import Sampler
from llmstack_model_runner.sampling.testing import make_sampling_rows
from llmstack_types import SamplingParams

VOCAB_SIZE = 50_257
NUM_ROWS = 32
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(seed=1),
    "top_k 50": SamplingParams(seed=1, top_k=50),
    "top_p 0.9": SamplingParams(seed=1, top_p=0.9),
    "min_p 0.05": SamplingParams(seed=1, min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5),
    "logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
}


@pytest.mark.parametrize("spread", [5.0, 0.5], ids=["peaked", "flat"])
@pytest.mark.parametrize("name", PARAMS)
@torch.inference_mode()
def test_sampler(benchmark: Any, name: str, spread: float) -> None:
    """A row has seen 500 tokens; peaked logits are those of a trained model, flat ones of random weights."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator) * spread
    tokens = torch.randint(VOCAB_SIZE, (NUM_ROWS, 500), generator=generator).numpy()
    rows = make_sampling_rows([PARAMS[name]] * NUM_ROWS, tokens.tolist(), VOCAB_SIZE, num_prompt_tokens=250)
    indices = np.arange(NUM_ROWS)
    output_indices = np.full(NUM_ROWS, 250)
    sampler = Sampler()
    benchmark(lambda: sampler.sample(logits, rows.metadata(indices, output_indices)).token_ids.tolist())
    benchmark.extra_info["us_per_row"] = benchmark.stats.stats.median / NUM_ROWS * 1e6
