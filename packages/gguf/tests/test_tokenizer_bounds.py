"""Tokenizers of GGUF files that would make more of a file than it holds are refused."""

from __future__ import annotations

from array import array

import pytest

from llmstack_gguf import GGUFError, tokenizer
from llmstack_gguf.header import Value
from llmstack_gguf.tokenizer import tokenizer_files


def metadata(tokens: list[str]) -> dict[str, Value]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": array("f", [-float(number) for number in range(len(tokens))]),
        "tokenizer.ggml.token_type": array("i", [1] * len(tokens)),
    }


def test_merges_that_follow_from_pieces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ["a" * length for length in range(1, 65)]  # each split of each piece is a merge
    merges = tokenizer_files(metadata(tokens))["tokenizer.json"]["model"]["merges"]
    assert len(merges) == 64 * 63 // 2
    monkeypatch.setattr(tokenizer, "_MAX_MERGES", len(merges) - 1)
    with pytest.raises(GGUFError, match="make more than 2015 merges"):
        tokenizer_files(metadata(tokens))


def test_splits_of_pieces_are_bounded_before_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_MAX_SPLITS", 100)
    assert tokenizer_files(metadata(["ab", "x" * 300, "c" * 98]))
    with pytest.raises(GGUFError, match="more than 100 characters"):
        tokenizer_files(metadata(["ab", "c" * 99]))
