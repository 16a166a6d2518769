"""Sampling rows of GPT-2's vocabulary, by what they ask for, as a multiple of one pass over their logits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from model_runner_helpers.sampling_rows import make_sampling_rows

from llmstack_model_runner.sampling import Sampler, TokenBitmask
from llmstack_types import SamplingParams

VOCAB_SIZE = 50_257
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(seed=1),
    "top_k 50": SamplingParams(seed=1, top_k=50),
    "top_p 0.9": SamplingParams(seed=1, top_p=0.9),
    "min_p 0.05": SamplingParams(seed=1, min_p=0.05),
    "typical_p 0.9": SamplingParams(seed=1, typical_p=0.9),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5),
    "bad words": SamplingParams(temperature=0.0, bad_words_token_ids=tuple((i, i + 1) for i in range(50))),
    "bitmask": SamplingParams(temperature=0.0),
    "logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
}


@pytest.mark.parametrize("spread", [5.0, 0.5], ids=["peaked", "flat"])
@pytest.mark.parametrize("num_rows", [1, 32, 256])
@pytest.mark.parametrize("name", PARAMS)
@torch.inference_mode()
def test_sampler(benchmark: Any, name: str, num_rows: int, spread: float) -> None:
    """A row has seen 500 tokens; peaked logits are those of a trained model, flat ones of random weights."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator) * spread
    tokens = torch.randint(VOCAB_SIZE, (num_rows, 500), generator=generator).tolist()
    rows = make_sampling_rows([PARAMS[name]] * num_rows, tokens, VOCAB_SIZE, num_prompt_tokens=250)
    indices, output_indices = np.arange(num_rows), np.full(num_rows, 250)
    words = np.full((num_rows, -(-VOCAB_SIZE // 32)), 0x55555555, dtype=np.int32)
    bitmask = TokenBitmask(indices, words) if name == "bitmask" else None
    sampler = Sampler()
    benchmark.pedantic(
        lambda: sampler.sample(logits, rows.metadata(indices, output_indices, bitmask)).token_ids.tolist(),
        rounds=max(5, 100 // num_rows),
        warmup_rounds=1,
    )
    # The least: on a busy machine the others measure its other work.
    least_s = benchmark.stats.stats.min
    benchmark.extra_info["us_per_row"] = least_s / num_rows * 1e6
    benchmark.extra_info["times_argmax"] = least_s / _seconds(lambda: torch.argmax(logits, dim=-1))
    benchmark.extra_info["times_one_pass"] = least_s / _seconds(lambda: torch.amax(logits, dim=-1))


def _seconds(run: Callable[[], object]) -> float:
    """The least of a few runs."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
