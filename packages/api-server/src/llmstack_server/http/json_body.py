"""Strict JSON: what two parsers could read differently is refused, and so is what would cost more than it says."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from llmstack_server.http.errors import ErrorAnswer, HTTPError, body_not_an_object, invalid_json

MAX_DEPTH = 64
# Longer than any 64-bit integer: what is cut here is out of every field's range all the same.
_MAX_INTEGER_DIGITS = 40


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in `body`. Linear in its length.

    Raises:
        HTTPError: 400; not UTF-8, not JSON, NaN or Infinity, a key twice, half a surrogate pair, nested deeper than
            64, or not an object.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        _refuse(invalid_json("it is not UTF-8"))
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        _refuse(invalid_json(f"it is nested deeper than {MAX_DEPTH} levels"))
    value = _decode(text)
    if b"\\u" in body and _has_lone_surrogate(value):
        _refuse(invalid_json("it holds half a surrogate pair"))
    if not isinstance(value, dict):
        _refuse(body_not_an_object())
    return value


def _decode(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError:
        _refuse(invalid_json("it is not valid JSON"))
    except ValueError:
        # CPython converts no integer of more than 4300 digits; saturated it gets its field's own error.
        return _SATURATING_DECODER.decode(text)


def _refuse(answer: ErrorAnswer) -> NoReturn:
    raise HTTPError(answer) from None


def _refuse_constant(name: str) -> NoReturn:
    _refuse(invalid_json(f"{name} is not JSON"))


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _refuse(invalid_json("a key occurs twice in one object"))
    return found


def _saturated_integer(digits: str) -> int:
    if len(digits) <= _MAX_INTEGER_DIGITS:
        return int(digits)
    return int(digits[:_MAX_INTEGER_DIGITS])


_DECODER = json.JSONDecoder(object_pairs_hook=_object_without_duplicates, parse_constant=_refuse_constant)
_SATURATING_DECODER = json.JSONDecoder(
    object_pairs_hook=_object_without_duplicates, parse_constant=_refuse_constant, parse_int=_saturated_integer
)


def _depth(text: str) -> int:
    """How deep brackets nest outside of strings. Before decoding, since the decoder recurses."""
    depth = deepest = 0
    for index, outside in enumerate(_split_strings(text)):
        if index % 2:
            continue
        for char in outside:
            if char in "[{":
                depth += 1
                deepest = max(deepest, depth)
            elif char in "]}":
                depth -= 1
        if deepest > MAX_DEPTH:
            break
    return deepest


def _split_strings(text: str) -> list[str]:
    """Text outside and inside of string literals, in turn."""
    return text.replace("\\\\", "").replace('\\"', "").split('"')


def _has_lone_surrogate(value: Any) -> bool:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if not _is_encodable(item):
                return True
        elif isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(entry for entry in item if isinstance(entry, str | dict | list))
    return False


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
