"""Sampling fields that together leave no token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.text.bad_words import BadWordSpelling


def forbid(
    values: dict[str, object],
    names: Mapping[str, str],
    spelling: BadWordSpelling,
    vocab_size: int,
    eos_token_ids: Sequence[int],
) -> None:
    """Adds the bad words as token ids; raises as `check_contradictions`."""
    if values.get("bad_words"):
        values["bad_words_token_ids"] = spelling.token_ids(values, vocab_size, names.get("bad_words", "bad_words"))
    check_contradictions(values, names, eos_token_ids)


def check_contradictions(values: Mapping[str, Any], names: Mapping[str, str], eos_token_ids: Sequence[int]) -> None:
    """Refuses fields by which no first token can be chosen, or no text.

    `values`: The fields in normal form, with bad words as token ids too.
    `eos_token_ids`: Tokens that end a text by themselves.

    Raises:
        InvalidRequestError: Names the field at fault.
    """
    allowed = values.get("allowed_token_ids")
    if allowed:
        _check_allowed(frozenset(allowed), values, names, eos_token_ids)
    words, constraint = values.get("bad_words"), values.get("structured_outputs")
    choices = None if constraint is None else constraint.choice
    if words and choices and all(any(word in choice for word in words) for choice in choices):
        name = names.get("structured_outputs.choice", "structured_outputs.choice")
        reason = f"each string of '{name}' has one of them"
        raise request_errors.invalid_value(names.get("bad_words", "bad_words"), reason)


def _check_allowed(
    allowed: frozenset[int], values: Mapping[str, Any], names: Mapping[str, str], eos_token_ids: Sequence[int]
) -> None:
    name = names.get("allowed_token_ids", "allowed_token_ids")
    left = allowed - {sequence[0] for sequence in values.get("bad_words_token_ids", ()) if len(sequence) == 1}
    if not left:
        raise request_errors.invalid_value(name, f"'{names.get('bad_words', 'bad_words')}' forbids all of them")
    if values.get("min_tokens") and left <= {*eos_token_ids, *(values.get("stop_token_ids") or ())}:
        other = names.get("min_tokens", "min_tokens")
        raise request_errors.invalid_value(name, f"all of them end the text, which '{other}' forbids")
