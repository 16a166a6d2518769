"""The sampler `infill` in a whole engine, with the texts of a real tokenizer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmstack_demo_model import model_path
from llmstack_llm import LLM
from llmstack_model_files.token_bytes import read_token_bytes
from llmstack_model_runner.sampling.infill import InfillRule, TokenTexts, kept_tokens
from llmstack_types import SamplingParams

TOP_K = 12
PROMPTS = ["Once upon a time", "The little dog was", "She said to the", "One day, Tom and"]


@pytest.mark.parametrize("ranks", [1, 2], ids=["one process", "two ranks"])
def test_every_token_is_one_that_infill_keeps(ranks: int) -> None:
    params = SamplingParams(max_tokens=12, top_k=TOP_K, infill=True, logprobs=TOP_K, seed=5, min_tokens=0)
    with LLM(str(model_path()), tensor_parallel_size=ranks, max_model_len=64) as llm:
        outputs = llm.generate(PROMPTS, params)
        free = llm.generate(PROMPTS, SamplingParams(max_tokens=12, top_k=TOP_K, logprobs=TOP_K, seed=5))
        ends = frozenset(llm.llm_engine.input_processor.eos_token_ids)
    rule = InfillRule(ends, TokenTexts(str(model_path())))
    assert read_token_bytes(model_path())[1] >= ends

    def is_kept(token_id: int, entries: dict[int, object]) -> bool:
        best = sorted(entries, key=lambda one: (-entries[one].logprob, one))[:TOP_K]  # type: ignore[attr-defined]
        masses = np.array([math.exp(entries[one].logprob) for one in best])  # type: ignore[attr-defined]
        kept = kept_tokens(np.array(best), masses / masses.sum(), rule)
        return token_id in kept if kept else token_id in ends

    def num_outside(answers: list[object]) -> int:
        places = [
            (token_id, entries)
            for one in answers
            for token_id, entries in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)  # type: ignore[attr-defined]
        ]
        assert len(places) > 3
        return sum(not is_kept(token_id, entries) for token_id, entries in places)

    assert num_outside(outputs) == 0
    assert num_outside(free) > 0
