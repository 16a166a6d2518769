"""Check of each sampling field: its type, its range and its normal form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.admission.bad_words import check_bad_words, check_bad_words_token_ids
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.rules import (
    INT64_MAX,
    INT64_MIN,
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
from llmstack_types import RepetitionDetectionParams, RequestOutputKind, ThinkingTags

FieldCheck = Callable[[str, Any, AdmissionLimits], Any]
"""A check of a field: its name, value and the limits in, the normal form out; raises InvalidRequestError."""

MAX_N = 128
MAX_BEST_OF = 20
MAX_LENGTH_PENALTY = 10.0  # ten thousand tokens to the tenth power is still a float
MAX_STREAM_INTERVAL = 1 << 20
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PATTERN_SIZE = 256  # a token costs as many comparisons, 10 µs
GREEDY_BELOW_TEMPERATURE = 1e-5
LOWEST_TEMPERATURE = 0.01


def _temperature(param: str, value: Any, limits: AdmissionLimits) -> float:
    """Nearly 0 is greedy. Division by less than 0.01 overflows, so such values are raised to it, as in vLLM."""
    _TEMPERATURE.check(param, value)
    return 0.0 if value < GREEDY_BELOW_TEMPERATURE else max(float(value), LOWEST_TEMPERATURE)


def _top_k(param: str, value: Any, limits: AdmissionLimits) -> int:
    _TOP_K.check(param, value)
    return int(max(value, 0))


def _seed(param: str, value: Any, limits: AdmissionLimits) -> int | None:
    _SEED.check(param, value)
    return None if value == -1 else value


def _num_logprobs(param: str, value: Any, limits: AdmissionLimits) -> Any:
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
    _THINKING_BUDGET.check(param, value)
    return None if value == -1 else value


def _truncation_side(param: str, value: Any, limits: AdmissionLimits) -> str:
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


def _logit_bias(param: str, value: Any, limits: AdmissionLimits) -> dict[int, float] | None:
    return normal_logit_bias(param, value, limits.vocab_size)


def _repetition_detection(param: str, value: Any, limits: AdmissionLimits) -> RepetitionDetectionParams | None:
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
_TEMPERATURE = DecimalRule(0.0, 2.0)
_THINKING_BUDGET = IntegerRule(-1, 2**31 - 1, is_optional=True)
_TOP_K = IntegerRule(-1, INT64_MAX)
_SEED = IntegerRule(
    INT64_MIN, INT64_MAX, is_optional=True, above_note=" (less_than_equal)", below_note=" (greater_than_equal)"
)
_PENALTY = DecimalRule(-2.0, 2.0)
_BOOLEAN = InstanceRule(bool, "a boolean")

FIELD_CHECKS: Mapping[str, FieldCheck] = {
    "n": IntegerRule(1, MAX_N).check,
    "best_of": IntegerRule(1, MAX_BEST_OF, is_optional=True).check,
    "use_beam_search": _BOOLEAN.check,
    "length_penalty": DecimalRule(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY).check,
    "temperature": _temperature,
    "top_p": DecimalRule(0.0, 1.0, is_minimum_excluded=True).check,
    "top_k": _top_k,
    "min_p": DecimalRule(0.0, 1.0).check,
    "typical_p": DecimalRule(0.0, 1.0, is_minimum_excluded=True).check,
    "presence_penalty": _PENALTY.check,
    "frequency_penalty": _PENALTY.check,
    # vLLM allows anything above 0; beyond these ends float32 logits overflow and the row turns to NaN.
    "repetition_penalty": DecimalRule(0.01, 100.0).check,
    "seed": _seed,
    "max_tokens": IntegerRule(0, INT64_MAX, is_optional=True).check,
    "min_tokens": IntegerRule(0, INT64_MAX).check,
    "logprobs": _num_logprobs,
    "prompt_logprobs": _num_logprobs,
    "ignore_eos": _BOOLEAN.check,
    "detokenize": _BOOLEAN.check,
    "skip_special_tokens": _BOOLEAN.check,
    "spaces_between_special_tokens": _BOOLEAN.check,
    "include_stop_str_in_output": _BOOLEAN.check,
    "output_kind": InstanceRule(RequestOutputKind, "an output kind").check,
    "kept_special_tokens": InstanceRule(tuple, "a tuple of strings").check,
    "stream_interval": IntegerRule(1, MAX_STREAM_INTERVAL).check,
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
    "no_repeat_ngram_size": IntegerRule(0, MAX_PATTERN_SIZE).check,
}
"""The order is that of the errors: of several bad fields the first one here is named."""
