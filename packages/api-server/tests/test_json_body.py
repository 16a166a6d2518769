"""Strict JSON: agrees with the standard library on what is fine, and refuses what is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.http.errors import HTTPError
from llmstack_server.http.json_body import MAX_DEPTH, decode_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5), st.booleans())
def test_what_json_writes_is_read_back(value: dict[str, Any], ensure_ascii: bool):
    assert decode_object(json.dumps(value, ensure_ascii=ensure_ascii).encode()) == value


@given(st.binary(max_size=60))
def test_any_bytes_give_an_object_or_a_refusal(body: bytes):
    status = 200
    try:
        decoded = decode_object(body)
    except HTTPError as error:
        decoded, status = {}, error.answer.status
    assert isinstance(decoded, dict)
    assert status in (200, 400)


@pytest.mark.parametrize("brackets", ["[]", "{}"])
@pytest.mark.parametrize(("depth", "is_fine"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False), (100_000, False)])
def test_nesting_is_limited_and_brackets_in_strings_do_not_nest(brackets: str, depth: int, is_fine: bool):
    body = '{"a":' * depth + "1" + "}" * depth
    if brackets == "[]":
        body = '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
    if is_fine:
        decode_object(body.encode())
    else:
        with pytest.raises(HTTPError, match="deeper"):
            decode_object(body.encode())
    decode_object(json.dumps({"a": '\\"[{' * depth, "b": "\\"}).encode())


def test_flat_arrays_of_any_length_are_fine():
    assert len(decode_object(json.dumps({"a": [[1]] * 10_000}).encode())["a"]) == 10_000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xef\xbb\xbf{}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1,}',
        b"{'a': 1}",
        b'{"a": 1} x',
        b'{"a": 01}',
        b'{"a": 1, "a": 1}',
        b'{"x": {"a": 1, "a": 2}}',
        b'{"a": "\\ud800"}',
        b'{"\\udc00": 1}',
        b'{"a": ["\\ud800"]}',
        b"\xff",
        b'{"a": "\t"}',
    ],
)
def test_what_two_parsers_could_read_differently_is_refused(body: bytes):
    with pytest.raises(HTTPError) as caught:
        decode_object(body)
    assert (caught.value.answer.status, caught.value.answer.code) == (400, None)


def test_a_pair_of_surrogates_is_one_character():
    assert decode_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.parametrize("sign", ["", "-"])
def test_integers_of_any_length_keep_their_sign_and_are_out_of_every_range(sign: str):
    value = decode_object(f'{{"a": {sign}{"9" * 10_000}, "b": 7}}'.encode())
    assert abs(value["a"]) > 2**64
    assert (value["a"] < 0) == (sign == "-")
    assert value["b"] == 7
