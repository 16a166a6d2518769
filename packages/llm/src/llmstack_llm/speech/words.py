"""Words of an answer, and when each is spoken."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

_WITHOUT_SPACES: Final = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that write no spaces between words: each character is one."""
_OPENING: Final = frozenset("\"'“¿([{-")
_CLOSING: Final = frozenset("\"'.。,，!！?？:：”)]}、")


class Word(NamedTuple):
    """A word with what is written before and behind it.

    Attributes:
        text: As it stands in the answer, a space in front included.
        start_s: From the beginning of the window, in seconds; `end_s` is where the next token begins.
    """

    text: str
    start_s: float
    end_s: float
    token_ids: tuple[int, ...]


class TimedToken(NamedTuple):
    """A token of text, and when it is spoken."""

    token_id: int
    start_s: float
    end_s: float


def words_of(tokens: Sequence[TimedToken], bytes_of: Callable[[int], bytes], language: str | None = None) -> list[Word]:
    """Joins tokens to words, and punctuation to the words that it belongs to, as Whisper does.

    `bytes_of`: Of a token of text.
    """
    parts = list(_whole_characters(tokens, bytes_of))
    if language not in _WITHOUT_SPACES:
        parts = _joined(parts)
    return _with_closing(_with_opening(parts))


def _whole_characters(tokens: Sequence[TimedToken], bytes_of: Callable[[int], bytes]) -> list[Word]:
    """The smallest runs of tokens that are whole characters; what never becomes one stays as it is."""
    parts: list[Word] = []
    run: list[TimedToken] = []
    for number, token in enumerate(tokens):
        run.append(token)
        data = b"".join(bytes_of(one.token_id) for one in run)
        text = data.decode(errors="replace")
        if "\ufffd" not in text or number + 1 == len(tokens):
            parts.append(Word(text, run[0].start_s, run[-1].end_s, tuple(one.token_id for one in run)))
            run = []
    return parts


def _joined(parts: Sequence[Word]) -> list[Word]:
    """Parts of one word together: a space or punctuation begins another."""
    words: list[Word] = []
    for part in parts:
        is_new = part.text.startswith(" ") or part.text.strip() in string.punctuation
        if is_new or not words:
            words.append(part)
        else:
            words[-1] = _sum(words[-1], part)
    return words


def _with_opening(words: Sequence[Word]) -> list[Word]:
    """Joins opening marks, such as a quotation mark behind a space, to the word behind them."""
    kept: list[Word] = []
    for word in reversed(words):
        if kept and word.text.startswith(" ") and word.text.strip() in _OPENING:
            kept[-1] = _sum(word, kept[-1])
        else:
            kept.append(word)
    return kept[::-1]


def _with_closing(words: Sequence[Word]) -> list[Word]:
    """Joins closing marks, such as a comma, to the word before them, whose time they do not change."""
    kept: list[Word] = []
    for word in words:
        if kept and not kept[-1].text.endswith(" ") and word.text in _CLOSING:
            before = kept[-1]
            kept[-1] = before._replace(text=before.text + word.text, token_ids=before.token_ids + word.token_ids)
        else:
            kept.append(word)
    return kept


def _sum(first: Word, second: Word) -> Word:
    return Word(first.text + second.text, first.start_s, second.end_s, first.token_ids + second.token_ids)
