"""Rules for the values of request fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmstack_llm import request_errors
from llmstack_types import InvalidRequestError

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGIT_BIAS = 100.0
TRUNCATION_SIDES = ("right", "left")
MAX_EXTRA_ARGS = 32
MAX_EXTRA_ARG_ITEMS = 256
MAX_EXTRA_ARG_CHARS = 1024
_NUM_IDS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class IntegerRule:
    """A closed range of integers.

    Attributes:
        is_optional: Allows None.
        above_note, below_note: Ends of the error's sentence, for clients that look for a word there.
    """

    minimum: int
    maximum: int
    is_optional: bool = False
    above_note: str = ""
    below_note: str = ""

    def check(self, param: str, value: object, limits: object = None) -> Any:
        """Returns the value, or raises InvalidRequestError."""
        if value is None and self.is_optional:
            return None
        if type(value) is not int:
            raise request_errors.invalid_type(param, "an integer", value)
        if value > self.maximum:
            raise request_errors.above_max(param, self.maximum, value, is_integer=True, note=self.above_note)
        if value < self.minimum:
            raise request_errors.below_min(param, self.minimum, value, is_integer=True, note=self.below_note)
        return value


@dataclass(frozen=True, slots=True)
class DecimalRule:
    """A range of finite numbers, integers included."""

    minimum: float
    maximum: float
    is_minimum_excluded: bool = False

    def check(self, param: str, value: object, limits: object = None) -> Any:
        """Returns the value, or raises InvalidRequestError."""
        if type(value) is not float and type(value) is not int:
            raise request_errors.invalid_type(param, "a decimal", value)
        if math.isnan(value) if type(value) is float else False:
            raise request_errors.invalid_value(param, "expected a finite number")
        if value > self.maximum:
            raise request_errors.above_max(param, self.maximum, value, is_integer=False)
        if value < self.minimum or (self.is_minimum_excluded and value == self.minimum):
            raise request_errors.below_min(
                param, self.minimum, value, is_integer=False, is_exclusive=self.is_minimum_excluded
            )
        return value


@dataclass(frozen=True, slots=True)
class InstanceRule:
    """Values of one exact type."""

    type_: type
    expected: str

    def check(self, param: str, value: object, limits: object = None) -> Any:
        """Returns the value, or raises InvalidRequestError."""
        if type(value) is not self.type_:
            raise request_errors.invalid_type(param, self.expected, value)
        return value


def check_stop(param: str, stop: object) -> None:
    """At most 16 strings, none empty, each at most 1 KiB."""
    if stop is None:
        return
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple):
        raise request_errors.invalid_type(param, "a string or an array of strings", stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise request_errors.array_too_long(param, MAX_STOP_STRINGS, len(strings))
    for string in strings:
        if not isinstance(string, str):
            raise request_errors.invalid_type(param, "a string or an array of strings", string)
        if not string:
            raise request_errors.empty_string(param)
        check_text(param, string)
        if len(string.encode()) > MAX_STOP_BYTES:
            raise request_errors.string_too_long(param, MAX_STOP_BYTES, len(string.encode()))


def check_text(param: str, text: str) -> None:
    """Refuses lone surrogates, which neither a tokenizer nor a response can encode."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise request_errors.invalid_value(param, "the text holds half a surrogate pair") from None


def check_sleep_level(level: object) -> int:
    """Checks the level of sleep: 1 frees the KV storage of an engine core, 2 the weights too."""
    if type(level) is not int or level not in (1, 2):
        raise InvalidRequestError("level must be 1 or 2.", param="level", code="invalid_value")
    return level


def check_token_ids(
    param: str, token_ids: object, vocab_size: int, *, max_length: int | None = None, num_checked: int | None = None
) -> None:
    """Integers in [0, vocab_size); the error's param is the entry, such as `prompt[3]`. Linear, in C but for one part.

    `num_checked`: How many are checked, where the caller refuses a prompt with more.
    """
    if not isinstance(token_ids, list | tuple):
        raise request_errors.invalid_type(param, "an array of token ids", token_ids)
    if max_length is not None and len(token_ids) > max_length:
        raise request_errors.array_too_long(param, max_length, len(token_ids))
    end = len(token_ids) if num_checked is None else min(num_checked, len(token_ids))
    for start in range(0, end, _NUM_IDS_AT_ONCE):
        part = token_ids[start : min(start + _NUM_IDS_AT_ONCE, end)]
        if set(map(type, part)) != {int} or min(part) < 0 or max(part) >= vocab_size:
            _refuse_token_id(param, part, start, vocab_size)


def check_placeholders(param: str, token_ids: Sequence[int], placeholders: Mapping[int, str]) -> None:
    """Refuses a prompt without media that has a token which stands for one.

    A model has nothing to put there: it would read an embedding that was never trained.

    `placeholders`: These tokens, by id.

    Raises:
        InvalidRequestError: Code `invalid_value`, with the token and its place.
    """
    if placeholders.keys().isdisjoint(token_ids):
        return
    index, token_id = next((index, one) for index, one in enumerate(token_ids) if one in placeholders)
    reason = (
        f"token {index} is {placeholders[token_id]!r} (id {token_id}), which stands for media that this prompt lacks"
    )
    raise request_errors.invalid_value(param, f"{reason}; send media as parts of messages")


def _refuse_token_id(param: str, token_ids: Sequence[object], start: int, vocab_size: int) -> None:
    for index, token_id in enumerate(token_ids, start):  # pragma: no branch - one of them is at fault
        if type(token_id) is not int:
            article = request_errors.type_name(token_id)
            raise request_errors.invalid_value(f"{param}[{index}]", f"expected a token id, but got {article} instead")
        if not 0 <= token_id < vocab_size:
            raise request_errors.out_of_vocabulary(f"{param}[{index}]", token_id, vocab_size)


def normal_logit_bias(param: str, logit_bias: object, vocab_size: int) -> dict[int, float] | None:
    """The checked map under integer ids; keys may be decimal strings, as JSON has no others."""
    if logit_bias is None:
        return None
    if not isinstance(logit_bias, Mapping):
        raise request_errors.invalid_type(param, "an object", logit_bias)
    if len(logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise request_errors.too_many_properties(param, MAX_LOGIT_BIAS_ENTRIES, len(logit_bias))
    return {_bias_token_id(param, key, vocab_size): _bias(param, value) for key, value in logit_bias.items()}


def _bias_token_id(param: str, key: object, vocab_size: int) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= len(str(INT64_MAX)):
        key = int(key)
    if type(key) is not int:
        raise request_errors.invalid_value(param, f"'{request_errors.echo(key)}' is not a token id")
    if not 0 <= key < vocab_size:
        raise request_errors.out_of_vocabulary(param, key, vocab_size)
    return key


def _bias(param: str, value: object) -> float:
    if type(value) is not float and type(value) is not int:
        raise request_errors.invalid_type(param, "an object of decimals", value)
    if not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:  # false for NaN too
        raise request_errors.invalid_value(param, "every bias must lie between -100 and 100")
    return float(value)


def check_truncation(param: str, asked: Any, max_tokens: int) -> int | None:
    """The number of tokens to which a prompt is cut; None if it is not cut.

    Raises:
        InvalidRequestError: `asked` is neither -1 nor from 1 to `max_tokens`.
    """
    if asked == 0:
        raise request_errors.invalid_value(param, "expected -1, or an integer of at least 1")
    IntegerRule(-1, max_tokens, is_optional=True).check(param, asked)
    return max_tokens if asked == -1 else asked


def check_truncation_side(param: str, side: object) -> None:
    """Raises InvalidRequestError for any other name of a side."""
    if side not in TRUNCATION_SIDES:
        raise request_errors.invalid_value(param, f"expected one of {', '.join(TRUNCATION_SIDES)}")


def check_extra_args(param: str, extra_args: object) -> None:
    """At most 32 names, each with a string, a number, a boolean, null, or an array of at most 256 of these.

    Raises:
        InvalidRequestError: Names `param`, or the value at fault.
    """
    if extra_args is None:
        return
    if not isinstance(extra_args, Mapping):
        raise request_errors.invalid_type(param, "an object", extra_args)
    if len(extra_args) > MAX_EXTRA_ARGS:
        raise request_errors.too_many_properties(param, MAX_EXTRA_ARGS, len(extra_args))
    for key, value in extra_args.items():
        _check_scalar(param, key, (str,), "an object with string keys")
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_EXTRA_ARG_ITEMS:
            raise request_errors.array_too_long(f"{param}.{request_errors.echo(key)}", MAX_EXTRA_ARG_ITEMS, len(items))
        for item in items:
            _check_scalar(f"{param}.{request_errors.echo(key)}", item, _SCALARS, "a scalar or an array of scalars")


_SCALARS = (str, bool, int, float, type(None))


def _check_scalar(param: str, value: object, types: tuple[type, ...], expected: str) -> None:
    if type(value) not in types:
        raise request_errors.invalid_type(param, expected, value)
    if isinstance(value, str):
        check_text(param, value)
        if len(value) > MAX_EXTRA_ARG_CHARS:
            raise request_errors.string_too_long(param, MAX_EXTRA_ARG_CHARS, len(value))
    if isinstance(value, int) and not INT64_MIN <= value <= INT64_MAX:
        raise request_errors.invalid_value(param, "an integer must have at most 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise request_errors.invalid_value(param, "expected a finite number")
