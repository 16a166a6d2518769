"""Checks of the words that must not be generated."""

from __future__ import annotations

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text, check_token_ids
from llmstack_llm.text.bad_words import MAX_SPELLINGS

MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 256
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
