"""Strict JSON: refuses ambiguous documents and those that are costly to decode."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from llmstack_server.web import json_pieces
from llmstack_server.web.errors import ErrorAnswer, HTTPError, body_not_an_object, invalid_json
from llmstack_server.web.json_pieces import DuplicateKeyError, PiecewiseDecoder
from llmstack_server.web.json_structure import (
    JSONLimits,
    StructureCheck,
    check_structure,
    escape_ends,
    is_surely_simple,
    without_escapes,
)
from llmstack_types.json_values import JSONObject

# Longer than any 64-bit integer: a number that is cut here stays out of every field's range.
_MAX_INTEGER_DIGITS = 40
_DUPLICATE_KEY = "a key occurs twice in one object"
_DEFAULT_LIMITS = JSONLimits()
WINDOW_BYTES = 1 << 17
_SURROGATES_BYTES = len(b"\\ud83d\\ude00")
# The first half of a pair without the second, or the second without the first.
_LONE_SURROGATE = re.compile(
    rb"\\u[dD](?:"
    rb"[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F]"
    rb")"
)


def decode_object(body: bytes | bytearray, limits: JSONLimits | None = None) -> dict[str, object]:
    """The JSON object in `body`, decoded in time linear in its length.

    Integers of more than 640 digits are cut to 40, which no field's range contains.

    Args:
        body: The bytes that were received.
        limits: Limits on the structure; None for the defaults.

    Raises:
        HTTPError: 400; not UTF-8, not JSON, NaN or Infinity, a key twice, half a surrogate pair, nested deeper than
            64, over a limit, or not an object.
    """
    if len(body) > json_pieces.PIECE_BYTES:
        for _ in (document := decoding(body, limits)).run():
            pass
        return document.value
    limits = limits or _DEFAULT_LIMITS
    decoder = _DECODER if is_surely_simple(body, limits) else _decoder_of(body, limits)
    try:
        value = decoder.decode(body.decode("utf-8"))
    except ValueError as error:
        raise _refusal(error) from None
    if not isinstance(value, dict):
        _refuse(body_not_an_object())
    return value


def _decoder_of(body: bytes | bytearray, limits: JSONLimits) -> json.JSONDecoder:
    """The decoder for a document within the limits.

    Raises:
        HTTPError: 400; it is over a limit, or has half a surrogate pair.
    """
    unescaped = without_escapes(body)
    has_long_number = check_structure(unescaped, limits)
    if b"\\u" in unescaped and _LONE_SURROGATE.search(unescaped):
        _refuse(invalid_json("it holds half a surrogate pair"))
    return _SATURATING_DECODER if has_long_number else _DECODER


@dataclass(slots=True)
class Decoding:
    """The decoding of one document in steps of a few milliseconds.

    Attributes:
        body: The bytes that were received.
        limits: Limits on the structure.
        value: The object, once `run` has ended.
    """

    body: bytes | bytearray
    limits: JSONLimits
    value: JSONObject = field(default_factory=dict)

    def run(self) -> Iterator[None]:
        """Decodes; other work may be done after each step. Raises as `decode_object`."""
        unescaped = bytearray()
        has_long_number = yield from self._scan(unescaped)
        decoder = _SATURATING_DECODER if has_long_number else _DECODER
        pieces = PiecewiseDecoder(self.body, unescaped, decoder.decode)
        try:
            yield from pieces.run()
        except ValueError as error:
            raise _refusal(error) from None
        if not isinstance(pieces.value, dict):
            _refuse(body_not_an_object())
        self.value = pieces.value

    def _scan(self, unescaped: bytearray) -> Generator[None, None, bool]:
        """Checks the structure, window by window, and fills `unescaped`; whether there is a long number."""
        body, check, start = self.body, StructureCheck(self.limits), 0
        while start < len(body):
            end = escape_ends(body, min(start + WINDOW_BYTES, len(body)))
            window = without_escapes(body[start:end])
            unescaped += window
            check.add(window)
            start = end
            yield
        has_long_number = check.finish()
        for start in range(0, len(unescaped), WINDOW_BYTES) if b"\\u" in unescaped else ():
            end = start + WINDOW_BYTES
            # A match that begins in the next window may lack its end here.
            match = _LONE_SURROGATE.search(unescaped, start, end + _SURROGATES_BYTES)
            if match is not None and match.start() < end:
                _refuse(invalid_json("it holds half a surrogate pair"))
            yield
        return has_long_number


def decoding(body: bytes | bytearray, limits: JSONLimits | None = None) -> Decoding:
    """The decoding of an object, its structure checked; arguments and errors as `decode_object`."""
    return Decoding(body, limits or _DEFAULT_LIMITS)


def _refusal(error: ValueError) -> HTTPError:
    """The answer to a document that cannot be decoded."""
    if isinstance(error, UnicodeDecodeError):
        return HTTPError(invalid_json("it is not UTF-8"))
    is_duplicate = isinstance(error, DuplicateKeyError)
    return HTTPError(invalid_json(_DUPLICATE_KEY if is_duplicate else "it is not valid JSON"))


def _refuse(answer: ErrorAnswer) -> NoReturn:
    raise HTTPError(answer) from None


def _refuse_constant(name: str) -> NoReturn:
    _refuse(invalid_json(f"{name} is not JSON"))


def _object_without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _refuse(invalid_json(_DUPLICATE_KEY))
    return found


def _saturated_integer(digits: str) -> int:
    if len(digits) <= _MAX_INTEGER_DIGITS:
        return int(digits)
    return int(digits[:_MAX_INTEGER_DIGITS])


_DECODER = json.JSONDecoder(object_pairs_hook=_object_without_duplicates, parse_constant=_refuse_constant)
_SATURATING_DECODER = json.JSONDecoder(
    object_pairs_hook=_object_without_duplicates, parse_constant=_refuse_constant, parse_int=_saturated_integer
)
