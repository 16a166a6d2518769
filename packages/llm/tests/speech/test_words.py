"""Tokens become words with their punctuation, in languages with spaces and without."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_llm.speech.words import TimedToken, words_of


def words(pieces: list[bytes], language: str) -> list[tuple[Any, ...]]:
    tokens = [TimedToken(number, number / 10, (number + 1) / 10) for number in range(len(pieces))]
    found = words_of(tokens, pieces.__getitem__, language)
    return [(word.text, round(word.start_s * 10), round(word.end_s * 10), word.token_ids) for word in found]


@pytest.mark.parametrize(
    ("pieces", "language", "expected"),
    [
        ([b" Ask", b" coun", b"try", b"."], "en", [(" Ask", 0, 1, (0,)), (" country.", 1, 3, (1, 2, 3))]),
        ([b" he", b' "', b"no", b'"', b"!"], "en", [(" he", 0, 1, (0,)), (' "no"!', 1, 3, (1, 2, 3, 4))]),
        (["日".encode(), "本".encode()[:2], "本".encode()[2:]], "ja", [("日", 0, 1, (0,)), ("本", 1, 3, (1, 2))]),
        ([b" na", "ï".encode()[:1], "ï".encode()[1:], b"ve"], "en", [(" naïve", 0, 4, (0, 1, 2, 3))]),
        ([b" x", b"\xff"], "en", [(" x\ufffd", 0, 2, (0, 1))]),
        ([], "en", []),
    ],
)
def test_words(pieces: list[bytes], language: str, expected: list[tuple[Any, ...]]) -> None:
    assert words(pieces, language) == expected
