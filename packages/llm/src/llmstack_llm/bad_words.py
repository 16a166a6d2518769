"""Words that must not be generated: what may be asked for, and the token ids that spell them."""

from __future__ import annotations

import dataclasses

from llmstack_llm import request_errors
from llmstack_llm.admit_rules import check_text, check_token_ids
from llmstack_llm.tokenizer import Tokenizer
from llmstack_types import SamplingParams

TokenIds = tuple[int, ...]

MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 256
# Spellings of a word: going on with a text, at its start, after a space.
MAX_SPELLINGS = 3
MAX_BAD_WORD_SEQUENCES = MAX_SPELLINGS * MAX_BAD_WORDS


def check_bad_words(param: str, bad_words: object) -> None:
    """At most 128 strings, none empty, each at most 256 bytes.

    Raises:
        InvalidRequestError: Names `param`.
    """
    if bad_words is None:
        return
    if not isinstance(bad_words, list | tuple):
        raise request_errors.invalid_type(param, "an array of strings", bad_words)
    if len(bad_words) > MAX_BAD_WORDS:
        raise request_errors.array_too_long(param, MAX_BAD_WORDS, len(bad_words))
    for word in bad_words:
        if not isinstance(word, str):
            raise request_errors.invalid_type(param, "an array of strings", word)
        if not word:
            raise request_errors.empty_string(param)
        check_text(param, word)
        if len(word.encode()) > MAX_BAD_WORD_BYTES:
            raise request_errors.string_too_long(param, MAX_BAD_WORD_BYTES, len(word.encode()))


def check_bad_words_token_ids(param: str, sequences: object, vocab_size: int) -> None:
    """At most 384 sequences of 1 to 256 token ids.

    Raises:
        InvalidRequestError: Names `param` or the entry.
    """
    if not isinstance(sequences, list | tuple):
        raise request_errors.invalid_type(param, "an array of arrays of token ids", sequences)
    if len(sequences) > MAX_BAD_WORD_SEQUENCES:
        raise request_errors.array_too_long(param, MAX_BAD_WORD_SEQUENCES, len(sequences))
    for index, sequence in enumerate(sequences):
        check_token_ids(f"{param}[{index}]", sequence, vocab_size, max_length=MAX_BAD_WORD_BYTES)
        if not sequence:
            raise request_errors.empty_array(f"{param}[{index}]")


class BadWordSpelling:
    """Turns bad words into token ids; remembers the last ones, since the prompts of a request share them."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._last: tuple[tuple[str, ...], int, tuple[TokenIds, ...]] | None = None

    def apply(self, params: SamplingParams, vocab_size: int, param: str) -> SamplingParams:
        """The parameters, which were admitted, with `bad_words` as token ids too.

        Raises:
            InvalidRequestError: There is no tokenizer, or a word that no token of the model spells.
        """
        if not params.bad_words:
            return params
        words, last = tuple(params.bad_words), self._last
        if last is None or last[:2] != (words, vocab_size):
            last = self._last = (words, vocab_size, self._spell(words, vocab_size, param))
        sequences = dict.fromkeys((*params.bad_words_token_ids, *last[2]))
        return dataclasses.replace(params, bad_words_token_ids=tuple(sequences))

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


def num_chars_of_bad_words(params: SamplingParams) -> int:
    """Characters that spelling the bad words tokenizes; the values may be of any type."""
    words: object = params.bad_words
    return (
        MAX_SPELLINGS * sum(len(word) for word in words if isinstance(word, str))
        if isinstance(words, list | tuple)
        else 0
    )


def _sequences(word: str, tokenizer: Tokenizer, vocab_size: int) -> list[TokenIds]:
    """The word's spellings, without those that only put other tokens before the same ones."""
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
