"""A spent budget of reasoning forces the tokens that end it, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from model_runner_helpers.sampling_rows import make_sampling_rows

from llmstack_model_runner.sampling import Sampler
from llmstack_types import SamplingParams, ThinkingTags

START, END, END_2, WORD, OTHER = 1, 2, 3, 4, 5
VOCAB_SIZE = 8


def thinking(budget: int, *, end: tuple[int, ...] = (END,), is_open: bool = True, **fields: Any) -> SamplingParams:
    tags = ThinkingTags((START,), end, is_open)
    return SamplingParams(temperature=0.0, thinking_token_budget=budget, thinking_tags=tags, **fields)


def generate(params: SamplingParams, num_tokens: int, wishes: tuple[int, ...] = ()) -> list[int]:
    """The tokens of a model that wants `wishes`, then words."""
    output: list[int] = []
    for _ in range(num_tokens):
        rows = make_sampling_rows([params], [[7, *output]], VOCAB_SIZE)
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, wishes[len(output)] if len(output) < len(wishes) else WORD] = 9.0
        sampled = Sampler().sample(logits, rows.metadata(np.array([0]), np.array([len(output)])))
        assert sampled.is_good.all()
        output.append(int(sampled.token_ids[0]))
    return output


@pytest.mark.parametrize(
    ("params", "wishes", "expected"),
    [
        (thinking(2), (), [WORD, WORD, END, WORD, WORD]),
        (thinking(0), (), [END, WORD, WORD, WORD, WORD]),
        (thinking(2, end=(END, END_2)), (), [WORD, WORD, END, END_2, WORD]),
        (thinking(2, end=(END, END)), (), [WORD, WORD, END, END, WORD]),
        (thinking(3), (WORD, END), [WORD, END, WORD, WORD, WORD]),
        (thinking(1, is_open=False), (), [WORD] * 5),
        (thinking(1, is_open=False), (OTHER, START), [OTHER, START, WORD, END, WORD]),
        (thinking(1), (WORD, OTHER), [WORD, END, WORD, WORD, WORD]),
        (thinking(1, bad_words_token_ids=((END,),), logit_bias={END: -100.0}), (), [WORD, END, WORD, WORD, WORD]),
        (thinking(1, allowed_token_ids=(WORD,)), (), [WORD, END, WORD, WORD, WORD]),
    ],
)
def test_reasoning_ends_where_its_budget_is_spent(
    params: SamplingParams, wishes: tuple[int, ...], expected: list[int]
) -> None:
    assert generate(params, 5, wishes) == expected


def test_without_tags_or_without_a_budget_nothing_is_forced() -> None:
    for fields in ({"thinking_token_budget": 0}, {"thinking_tags": ThinkingTags((START,), (END,), is_open=True)}):
        assert generate(SamplingParams(temperature=0.0, **fields), 3) == [WORD] * 3


def test_drafts_count_as_generated_for_the_tokens_behind_them() -> None:
    rows = make_sampling_rows([thinking(2)], [[7, WORD]], VOCAB_SIZE, drafts=[[WORD, OTHER]])
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, WORD] = 9.0
    sampled = Sampler().sample(logits, rows.metadata(np.array([0, 0, 0]), np.array([1, 2, 3])))
    assert sampled.token_ids.tolist() == [WORD, END, WORD]


def test_other_rows_of_the_step_and_draws_are_left_alone() -> None:
    params = [thinking(0), SamplingParams(temperature=1.5, seed=4), SamplingParams(temperature=0.0, logprobs=1)]
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    alone = make_sampling_rows(params[1:], [[7], [7]], VOCAB_SIZE).metadata(np.array([0, 1]), np.array([0, 0]))
    expected = Sampler().sample(logits[1:].clone(), alone).token_ids.tolist()
    together = make_sampling_rows(params, [[7]] * 3, VOCAB_SIZE).metadata(np.arange(3), np.zeros(3, dtype=np.int64))
    assert Sampler().sample(logits, together).token_ids.tolist() == [END, *expected]
