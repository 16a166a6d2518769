"""The n-grams that DeepSeek-OCR may not repeat within a window."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from llmstack_model_runner.sampling import AddedRow, LogitsRows, load_logits_processors
from llmstack_model_runner.sampling.window_ngrams import WindowNgrams
from llmstack_types import SamplingParams

NAME = "llmstack_model_runner.sampling.window_ngrams:WindowNgrams"
VOCAB_SIZE = 20


def as_published(outputs: list[int], size: int, window: int, allowed: set[int]) -> set[int]:
    """The banned tokens, as the code beside the published checkpoint counts them."""
    if len(outputs) < size:
        return set()
    prefix, banned = tuple(outputs[len(outputs) - size + 1 :]), set()
    for start in range(max(0, len(outputs) - window), len(outputs) - size + 1):
        ngram = tuple(outputs[start : start + size])
        if ngram[:-1] == prefix:
            banned.add(ngram[-1])
    return banned - allowed


def banned_of(prompt: list[int], outputs: list[int], arguments: dict[str, Any]) -> set[int]:
    processor = WindowNgrams(4, VOCAB_SIZE, torch.device("cpu"))
    token_ids = np.array([*prompt, *outputs, 0, 0], dtype=np.int32)  # what is behind them is not of the request yet
    processor.update_state([], [AddedRow(2, SamplingParams(extra_args=arguments), len(prompt), token_ids)])
    rows = LogitsRows(np.array([1, 2]), np.array([5, len(outputs)]))
    logits = processor.apply(torch.zeros(2, VOCAB_SIZE), rows)
    assert torch.isfinite(logits[0]).all()  # the row beside it asks for nothing
    return set(torch.isinf(logits[1]).nonzero().flatten().tolist())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("window", [2, 7, 90])
def test_tokens_are_banned_as_published(size: int, window: int) -> None:
    draws = np.random.default_rng(0)
    for length in range(25):
        outputs = draws.integers(0, 3, length).tolist()
        arguments = {"ngram_size": size, "window_size": window, "whitelist_token_ids": [2]}
        assert banned_of([1, 1, 1, 1], outputs, arguments) == as_published(outputs, size, window, {2})


def test_without_arguments_nothing_is_done_and_the_window_has_a_default() -> None:
    assert banned_of([], [1, 2, 1, 2, 1], {}) == set()
    assert banned_of([], [1, 2, 1, 2, 1], {"ngram_size": 2}) == {2}
    assert banned_of([], [1, 2, *[3] * 120, 1], {"ngram_size": 2}) == set()


@pytest.mark.parametrize(
    "arguments", [{"ngram_size": 0}, {"ngram_size": "3"}, {"ngram_size": 3, "window_size": -1}, {"ngram_size": True}]
)
def test_other_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be an integer from 1 to"):
        banned_of([], [1], arguments)


@pytest.mark.parametrize("listed", [[1.5], ["2"], [True], [None], 3, "3"])
def test_a_list_of_other_things_than_tokens_is_refused(listed: object) -> None:
    with pytest.raises(ValueError, match="whitelist_token_ids must be an array of token ids"):
        banned_of([], [1], {"ngram_size": 1, "whitelist_token_ids": listed})


def test_long_sequences_in_a_long_window_cost_no_more_than_the_window() -> None:
    outputs = [*range(1, 9)] * 5000
    tracemalloc.start()
    try:
        assert banned_of([], outputs, {"ngram_size": 20_000, "window_size": 1 << 16}) == {1}
        assert tracemalloc.get_traced_memory()[1] < 100 * 8 * len(outputs)  # each token has some numbers
    finally:
        tracemalloc.stop()


def test_a_removed_row_asks_for_nothing() -> None:
    (kind,) = load_logits_processors([NAME])[-1:]
    processor = kind(4, VOCAB_SIZE, torch.device("cpu"))
    token_ids = np.array([1, 2, 1], dtype=np.int32)
    processor.update_state([], [AddedRow(0, SamplingParams(extra_args={"ngram_size": 2}), 0, token_ids)])
    processor.update_state([0], [])
    logits = processor.apply(torch.zeros(1, VOCAB_SIZE), LogitsRows(np.array([0]), np.array([3])))
    assert torch.isfinite(logits).all()
