"""Check of each sampling field: its type, its range and its normal form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from llmstack_llm import request_errors
from llmstack_llm.admission.bad_words import check_bad_words, check_bad_words_token_ids
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.rules import (
    DecimalRule,
    InstanceRule,
    IntegerRule,
    check_extra_args,
    check_stop,
    check_token_ids,
    check_truncation,
    check_truncation_side,
    normal_logit_bias,
)
from llmstack_types import RepetitionDetectionParams, RequestOutputKind, SamplingParams, ThinkingTags
from llmstack_types.field_facts import INT64_MAX, INT64_MIN, facts_of
from llmstack_types.sampling_params import MAX_PATTERN_SIZE

FieldCheck = Callable[[str, Any, AdmissionLimits], Any]
"""A check of a field: its name, value and the limits in, the normal form out; raises InvalidRequestError."""

MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
GREEDY_BELOW_TEMPERATURE = 1e-5
LOWEST_TEMPERATURE = 0.01


def _ranges(cls: type) -> dict[str, IntegerRule | DecimalRule]:
    """The rules of the fields of a dataclass that declare a range of numbers."""
    rules: dict[str, IntegerRule | DecimalRule] = {}
    hints = get_type_hints(cls)
    for name, facts in facts_of(cls).items():
        if facts.minimum is None or facts.maximum is None:
            continue
        types = {hints[name], *get_args(hints[name])}
        if float in types:
            rules[name] = DecimalRule(facts.minimum, facts.maximum, facts.excludes_minimum)
        else:
            rules[name] = IntegerRule(int(facts.minimum), int(facts.maximum), is_optional=type(None) in types)
    return rules


RANGES = _ranges(SamplingParams)
"""Field of `SamplingParams` to its declared range."""
_SEED = IntegerRule(
    INT64_MIN, INT64_MAX, is_optional=True, above_note=" (less_than_equal)", below_note=" (greater_than_equal)"
)


def _temperature(param: str, value: Any, limits: AdmissionLimits) -> float:
    """Nearly 0 is greedy. Division by less than 0.01 overflows, so such values are raised to it, as in vLLM."""
    RANGES["temperature"].check(param, value)
    return 0.0 if value < GREEDY_BELOW_TEMPERATURE else max(float(value), LOWEST_TEMPERATURE)


def _top_k(param: str, value: Any, limits: AdmissionLimits) -> int:
    RANGES["top_k"].check(param, value)
    return int(max(value, 0))


def _seed(param: str, value: Any, limits: AdmissionLimits) -> int | None:
    _SEED.check(param, value)
    return None if value == -1 else value


def _num_logprobs(param: str, value: object, limits: AdmissionLimits) -> object:
    """The number; -1 is the whole vocabulary, where the server allows so many."""
    if value == -1 and type(value) is int and limits.max_logprobs >= limits.vocab_size:
        return limits.vocab_size
    return IntegerRule(0, limits.max_logprobs, is_optional=True).check(param, value)


def _stop(param: str, value: Any, limits: AdmissionLimits) -> tuple[str, ...]:
    check_stop(param, value)
    return (value,) if isinstance(value, str) else tuple(value or ())


def _stop_token_ids(param: str, value: Any, limits: AdmissionLimits) -> tuple[int, ...] | None:
    if value is None:
        return None
    check_token_ids(param, value, limits.vocab_size, max_length=MAX_STOP_TOKEN_IDS)
    return tuple(value)


def _allowed_token_ids(param: str, value: Any, limits: AdmissionLimits) -> tuple[int, ...] | None:
    if value is None:
        return None
    check_token_ids(param, value, limits.vocab_size, max_length=limits.vocab_size)
    if not value:
        raise request_errors.empty_array(param)
    return tuple(value)


def _logprob_token_ids(param: str, value: Any, limits: AdmissionLimits) -> tuple[int, ...] | None:
    if not value and (value is None or isinstance(value, list | tuple)):
        return None
    check_token_ids(param, value, limits.vocab_size, max_length=MAX_LOGPROB_TOKEN_IDS)
    return tuple(dict.fromkeys(value))


def _thinking_token_budget(param: str, value: Any, limits: AdmissionLimits) -> int | None:
    """The limit; -1 is none, as in vLLM."""
    RANGES["thinking_token_budget"].check(param, value)
    return None if value == -1 else value


def _truncation_side(param: str, value: object, limits: AdmissionLimits) -> str:
    check_truncation_side(param, value)
    return str(value)


def _truncate_prompt_tokens(param: str, value: Any, limits: AdmissionLimits) -> int | None:
    check_truncation(param, value, limits.max_request_tokens)
    return value  # type: ignore[no-any-return]  # the rule has checked it


def _extra_args(param: str, value: Any, limits: AdmissionLimits) -> dict[str, Any] | None:
    check_extra_args(param, value)
    return None if value is None else dict(value)


def _bad_words(param: str, value: Any, limits: AdmissionLimits) -> tuple[str, ...] | None:
    check_bad_words(param, value)
    return None if value is None else tuple(value)


def _bad_words_token_ids(param: str, value: Any, limits: AdmissionLimits) -> tuple[tuple[int, ...], ...]:
    check_bad_words_token_ids(param, value, limits.vocab_size)
    return tuple(tuple(sequence) for sequence in value)


def _logit_bias(param: str, value: object, limits: AdmissionLimits) -> dict[int, float] | None:
    return normal_logit_bias(param, value, limits.vocab_size)


def _repetition_detection(param: str, value: object, limits: AdmissionLimits) -> RepetitionDetectionParams | None:
    """The object of a request, or the parameters themselves; None where no pattern is looked for."""
    if isinstance(value, RepetitionDetectionParams):
        value = dataclasses.asdict(value)
    if not isinstance(value, Mapping):
        raise request_errors.invalid_type(param, "an object", value)
    numbers = {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0}
    for name, number in value.items():
        shown = f"{param}.{request_errors.echo(name)}"
        if name not in numbers:
            raise request_errors.unsupported_parameter(shown, f"'{shown}' is not supported by this server")
        numbers[name] = _PATTERN_SIZE.check(shown, number) or 0
    found = RepetitionDetectionParams(**numbers)
    if found.min_pattern_size > found.max_pattern_size:
        raise request_errors.invalid_value(f"{param}.min_pattern_size", "must not be above 'max_pattern_size'")
    if not found.max_pattern_size:
        return None
    if found.min_count < 2:
        raise request_errors.below_min(f"{param}.min_count", 2, found.min_count, is_integer=True)
    return found


_PATTERN_SIZE = IntegerRule(0, MAX_PATTERN_SIZE, is_optional=True)
_BOOLEAN = InstanceRule(bool, "a boolean")

_SPECIAL: Mapping[str, FieldCheck] = {
    "temperature": _temperature,
    "top_k": _top_k,
    "seed": _seed,
    "logprobs": _num_logprobs,
    "prompt_logprobs": _num_logprobs,
    "output_kind": InstanceRule(RequestOutputKind, "an output kind").check,
    "kept_special_tokens": InstanceRule(tuple, "a tuple of strings").check,
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "allowed_token_ids": _allowed_token_ids,
    "logprob_token_ids": _logprob_token_ids,
    "thinking_token_budget": _thinking_token_budget,
    "thinking_tags": InstanceRule(ThinkingTags, "the tags of reasoning").check,
    "truncation_side": _truncation_side,
    "extra_args": _extra_args,
    "bad_words": _bad_words,
    "bad_words_token_ids": _bad_words_token_ids,
    "logit_bias": _logit_bias,
    "truncate_prompt_tokens": _truncate_prompt_tokens,
    "repetition_detection": _repetition_detection,
}
"""What a declared range does not say."""
_CHECKED_TOGETHER = frozenset({"early_stopping", "structured_outputs"})
"""What `check_sampling` checks with other fields."""


def _declared_checks() -> dict[str, FieldCheck]:
    hints = get_type_hints(SamplingParams)
    checks: dict[str, FieldCheck] = {}
    for name in hints.keys() - _CHECKED_TOGETHER:
        rule = RANGES.get(name) or (_BOOLEAN if hints[name] is bool else None)
        check = _SPECIAL.get(name) or (None if rule is None else rule.check)
        if check is None:
            raise TypeError(f"SamplingParams.{name} declares no range, and has no check")
        checks[name] = check
    return {name: checks[name] for name in hints if name in checks}


FIELD_CHECKS: Mapping[str, FieldCheck] = _declared_checks()
"""The order is that of `SamplingParams`: of several bad fields the first one there is named."""
