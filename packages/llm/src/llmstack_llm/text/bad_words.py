"""Spelling of bad words: the token ids that must not be generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.text.tokenizer import Tokenizer

TokenIds = tuple[int, ...]

MAX_SPELLINGS = 3
"""Spellings of a word: after other text, at the start of a text, after a space."""


class BadWordSpelling:
    """Turns bad words into token ids; remembers the last ones, since the prompts of a request share them."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._last: tuple[tuple[str, ...], int, tuple[TokenIds, ...]] | None = None

    def token_ids(self, values: Mapping[str, Any], vocab_size: int, param: str) -> tuple[TokenIds, ...]:
        """The sequences of `bad_words_token_ids` and those that spell `bad_words`; `values` are checked.

        Raises:
            InvalidRequestError: There is no tokenizer, or a word that no token of the model spells.
        """
        words, last = tuple(values["bad_words"]), self._last
        if last is None or last[:2] != (words, vocab_size):
            last = self._last = (words, vocab_size, self._spell(words, vocab_size, param))
        return tuple(dict.fromkeys((*values.get("bad_words_token_ids", ()), *last[2])))

    def _spell(self, words: tuple[str, ...], vocab_size: int, param: str) -> tuple[TokenIds, ...]:
        if self._tokenizer is None:
            raise request_errors.unsupported_value(param, "bad words need a tokenizer")
        sequences: list[TokenIds] = []
        for word in words:
            found = _sequences(word, self._tokenizer, vocab_size)
            if not found:
                raise request_errors.invalid_value(param, f"'{request_errors.echo(word)}' has no tokens in this model")
            sequences.extend(found)
        return tuple(sequences)


def num_chars_of_bad_words(words: Sequence[str]) -> int:
    """Characters that spelling the words tokenizes."""
    return MAX_SPELLINGS * sum(map(len, words))


def _sequences(word: str, tokenizer: Tokenizer, vocab_size: int) -> list[TokenIds]:
    """The word's spellings; a longer one that ends with a shorter one is left out."""
    bare = word.lstrip() or word
    found: list[TokenIds] = []
    for token_ids in (
        _going_on(bare, tokenizer),
        *(tuple(tokenizer.encode_plain(text)) for text in (bare, f" {bare}")),
    ):
        if not token_ids:  # a tokenizer without such characters; what is left of the last text is the space
            return found
        # A token the model has no logit for is never generated, and neither is the word.
        if max(token_ids) < vocab_size and not any(token_ids[-len(shorter) :] == shorter for shorter in found):
            found.append(token_ids)
    return found


def _going_on(word: str, tokenizer: Tokenizer) -> TokenIds:
    """The word right after a text: SentencePiece puts a space before the start of one.

    What no text before it leaves alone is spelled as at the start.
    """
    for before in ("\n", "a", "."):
        prefix = tokenizer.encode_plain(before)
        token_ids = tokenizer.encode_plain(before + word)
        if len(token_ids) > len(prefix) and token_ids[: len(prefix)] == prefix:
            return tuple(token_ids[len(prefix) :])
    return tuple(tokenizer.encode_plain(word))
