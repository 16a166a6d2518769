"""Strict JSON: agrees with the standard library on what is fine, and refuses what is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.web import json_body
from llmstack_server.web.errors import HTTPError
from llmstack_server.web.json_body import decode_object
from llmstack_server.web.json_structure import MAX_DEPTH, JSONLimits, check_structure, is_surely_simple, without_escapes

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


@given(
    st.lists(
        st.sampled_from(["[", "{", "]", "}", ",", ":", '"', "\\", "\\u12", "a", "1" * 300, " ", "e"]), max_size=90
    ),
    st.sampled_from([JSONLimits(), JSONLimits(max_nodes=9), JSONLimits(max_strings=3), JSONLimits(max_values=5)]),
)
def test_what_is_surely_simple_passes_the_whole_check(pieces: list[str], limits: JSONLimits):
    document = "".join(pieces).encode()
    if is_surely_simple(document, limits):
        assert check_structure(without_escapes(document), limits) is False
        assert b"\\u" not in document


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
        b'{"a":' + b"1" * 5000 + b"} x",
        b'{"a":' + b"1" * 5000,
        b'{"a":[' + b"1" * 5000 + b",]}",
        b'{"a":0' + b"1" * 5000 + b"}",
        b'{"a":' + b"1" * 5000 + b',"a":1}',
        b'{"a":' + b"1" * 5000 + b',"b":NaN}',
        b'{"a":-}',
        b'{"a":1.}',
        b'{"a":1e}',
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


@pytest.mark.parametrize("number", ["1." + "7" * 10_000, "0." + "0" * 700 + "1", "1e0" + "0" * 5000 + "5", "1e400"])
def test_floats_of_any_length_are_read_in_full(number: str):
    assert decode_object(f'{{"a": {number}}}'.encode()) == {"a": float(number)}


@given(st.lists(st.sampled_from(["\\ud83d", "\\uDE00", "\\\\", '\\"', "\\n", "a", "\\u0041", "ud800"])))
def test_surrogates_are_paired_as_the_decoder_pairs_them(pieces: list[str]):
    body = '{"a": "' + "".join(pieces) + '"}'
    expected = json.loads(body)
    try:
        expected["a"].encode()
    except UnicodeEncodeError:
        with pytest.raises(HTTPError, match="surrogate"):
            decode_object(body.encode())
    else:
        assert decode_object(body.encode()) == expected


class CountingDecoder:
    """Counts documents instead of decoding them."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, text: str) -> Any:
        self.num_decoded += 1
        return {}


def array_of(entry: str, count: int) -> str:
    return "[" + ",".join([entry] * count) + "]"


LIMITS = JSONLimits()
COSTLY = {
    "a million empty arrays": array_of("[]", 1_000_000),
    "objects": array_of("{}", LIMITS.max_nodes),
    "members": "{" + ",".join(f'"{index}":0' for index in range(LIMITS.max_nodes)) + "}",
    "strings": array_of('""', LIMITS.max_strings),
    "numbers": array_of("1", LIMITS.max_values + 1),
    "fractions": array_of("1.5", LIMITS.max_values // 2 + 1),
    "exponents": array_of("1e5", LIMITS.max_values // 2 + 1),
    "numbers beside a long one": "[" + "1," * LIMITS.max_values_beside_long_integers + "9" * 5000 + "]",
    "malformed": "[" + "[]," * LIMITS.max_nodes,
}


@pytest.mark.parametrize("value", COSTLY.values(), ids=COSTLY)
def test_costly_documents_are_refused_and_never_decoded(monkeypatch: pytest.MonkeyPatch, value: str):
    decoder = CountingDecoder()
    monkeypatch.setattr(json_body, "_DECODER", decoder)
    monkeypatch.setattr(json_body, "_SATURATING_DECODER", decoder)
    with pytest.raises(HTTPError) as caught:
        decode_object(f'{{"a":{value}}}'.encode())
    answer = caught.value.answer
    assert (answer.status, answer.code, answer.param) == (400, "request_budget_exceeded", None)
    assert decoder.num_decoded == 0


LEGAL: dict[str, Any] = {
    "token ids": {"prompt": [128_000] * 600_000},
    "prompts of token ids": {"prompt": [[50_000] * 500] * 1024},
    "a long chat": {"messages": [{"role": "user", "content": "Hello"}] * 20_000},
    "logit_bias": {"prompt": "a", "logit_bias": {str(index): -0.5 for index in range(1024)}},
    "texts": {"input": ["a text, and 'more'"] * 2048},
    "code in a text": {"prompt": '{"a": [1, 2, {"b": [[], "\\\\"]}]},\n' * 80_000},
}


@pytest.mark.parametrize("value", LEGAL.values(), ids=LEGAL)
def test_large_requests_that_the_fields_permit_are_decoded(value: dict[str, Any]):
    assert decode_object(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        ('[{"b":0}]', JSONLimits(max_nodes=5)),
        ('["b",":",{}]', JSONLimits(max_strings=3)),
        ("[1,2,3]", JSONLimits(max_values=3)),
        ("[1,0.5]", JSONLimits(max_values=3)),
    ],
)
def test_limits_include_their_value(value: str, limits: JSONLimits):
    body = f'{{"a":{value}}}'.encode()
    decode_object(body, limits)
    lower = JSONLimits(*(getattr(limits, name) - 1 for name in ("max_nodes", "max_strings", "max_values")))
    with pytest.raises(HTTPError, match="has more than"):
        decode_object(body, lower)


def test_limits_follow_the_size_of_the_largest_body_and_are_never_below_the_defaults():
    assert JSONLimits.of_body(1000) == JSONLimits.of_body(4 << 20) == JSONLimits()
    assert JSONLimits.of_body(16 << 20) == JSONLimits(1 << 18, 1 << 19, 1 << 22)
