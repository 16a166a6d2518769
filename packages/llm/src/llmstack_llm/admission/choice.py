"""Checks of `best_of` and beam search, and of the fields that they exclude."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sized
from typing import Any

from llmstack_llm import request_errors
from llmstack_types import RequestOutputKind, SamplingParams

CHOICE_FIELDS = frozenset({"best_of", "use_beam_search", "length_penalty", "early_stopping", "forced_eos_token_id"})

# Fields that a beam search applies, or that do not change the choice of tokens. Of what changes probabilities it has
# what transformers applies to beams; any other field must have its default.
_FIT_FOR_BEAMS = frozenset(
    {
        "n", "best_of", "temperature", "seed", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs", "detokenize",
        "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
        "use_beam_search", "length_penalty", "early_stopping", "kept_special_tokens", "stream_interval",
        "truncate_prompt_tokens", "truncation_side", "min_tokens", "no_repeat_ngram_size", "bad_words",
        "bad_words_token_ids", "allowed_token_ids", "repetition_penalty", "forced_bos_token_id", "forced_eos_token_id",
    }
)  # fmt: skip
_MUST_BE_NEUTRAL: Mapping[str, Any] = {
    field.name: field.default for field in dataclasses.fields(SamplingParams) if field.name not in _FIT_FOR_BEAMS
}
_OF_BEAMS: Mapping[str, object] = {"length_penalty": 1, "early_stopping": False, "forced_eos_token_id": None}


def is_chosen_at_end(values: Mapping[str, Any]) -> bool:
    """Whether the completions to return are chosen when all have ended."""
    best_of = values.get("best_of")
    return bool(values.get("use_beam_search")) or (best_of is not None and best_of > values.get("n", 1))


def check_choice(values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Checks `best_of` and the fields of a beam search.

    `values`: All fields; their ranges have been checked.

    Raises:
        InvalidRequestError: Names the first field at fault.
    """

    def name(field: str) -> str:
        return names.get(field, field)

    if type(values["early_stopping"]) is not bool and values["early_stopping"] != "never":
        raise request_errors.invalid_value(name("early_stopping"), "expected true, false or 'never'")
    if values["best_of"] is not None:
        _check_best_of(values, values["best_of"], name)
    if values["use_beam_search"]:
        _check_beam_search(values, name)
        return
    for field, default in _OF_BEAMS.items():
        if values[field] != default:
            reason = f"it is only allowed together with '{name('use_beam_search')}'"
            raise request_errors.invalid_value(name(field), reason)


def _check_best_of(values: Mapping[str, Any], best_of: int, name: Callable[[str], str]) -> None:
    if best_of < values["n"]:
        raise request_errors.invalid_value(name("best_of"), f"it must not be below '{name('n')}'")
    if best_of > 1 and values["output_kind"] is RequestOutputKind.DELTA:
        raise request_errors.invalid_value(name("best_of"), "the best is known at the end, so it cannot be streamed")
    if best_of > values["n"] and values["use_beam_search"]:
        raise request_errors.invalid_value(name("best_of"), f"a beam search keeps '{name('n')}' beams")
    if best_of > values["n"] and values["temperature"] == 0:
        raise request_errors.invalid_value(name("best_of"), "at temperature 0 all completions are the same")


def _check_beam_search(values: Mapping[str, object], name: Callable[[str], str]) -> None:
    if values["output_kind"] is RequestOutputKind.DELTA:
        reason = "its result is known at the end, so it cannot be streamed"
        raise request_errors.invalid_value(name("use_beam_search"), reason)
    if values["temperature"] not in (0, 1):
        reason = f"with '{name('use_beam_search')}' nothing is drawn, so it must be 0 or 1"
        raise request_errors.invalid_value(name("temperature"), reason)
    for field, default in _MUST_BE_NEUTRAL.items():
        value = values[field]
        is_empty = isinstance(value, Sized) and not len(value)
        if not (value == default or is_empty):
            raise request_errors.invalid_value(name(field), f"it cannot be combined with '{name('use_beam_search')}'")
