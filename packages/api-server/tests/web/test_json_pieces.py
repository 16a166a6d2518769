"""Documents decoded in pieces: as in one, whatever the size of a piece."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_server.web import json_body, json_pieces
from llmstack_server.web.errors import HTTPError
from llmstack_server.web.json_body import decode_object, decoding
from llmstack_server.web.json_structure import JSONLimits

WHOLE = 1 << 30
TEXTS = st.text('ab,:[]{}"\\é\U0001f600 ', max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)
SEPARATORS = st.sampled_from([(",", ":"), (" , ", " : "), ("\n,\t", ":\r")])


def decoded(body: bytes, piece_bytes: int) -> Any:
    """The object, or the code of its refusal, with the pieces of some size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_pieces, "PIECE_BYTES", piece_bytes)
        patch.setattr(json_body, "WINDOW_BYTES", piece_bytes)
        try:
            return decode_object(body)
        except HTTPError as error:
            return error.answer.status, error.answer.code


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, max_size=5), SEPARATORS, st.booleans(), st.integers(1, 20))
def test_pieces_of_any_size_add_up_to_the_document(
    value: dict[str, Any], separators: tuple[str, str], ensure_ascii: bool, piece_bytes: int
):
    body = json.dumps(value, separators=separators, ensure_ascii=ensure_ascii).encode()
    found = decoded(body, piece_bytes)
    assert found == value
    assert json.dumps(found) == json.dumps(value), "members keep their order, and numbers their type"


@settings(max_examples=120, deadline=None)
@given(
    st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from(["", *',]["{}:1 \\'])), min_size=1, max_size=3),
    st.integers(1, 20),
)
def test_what_is_malformed_is_refused_with_pieces_of_any_size(
    value: dict[str, Any], changes: list[tuple[int, str]], piece_bytes: int
):
    text = json.dumps(value, ensure_ascii=False)
    for place, char in changes:
        at = place % (len(text) + 1)
        text = text[:at] + char + text[at + (not char) :]
    assert decoded(text.encode(), piece_bytes) == decoded(text.encode(), WHOLE)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[1,]}',
        b'{"a":[,1]}',
        b'{"a":[1,,2]}',
        b'{"a":{"b":1,}}',
        b'{"a":{,"b":1}}',
        b'{"a":[1,2},"b":3]',
        b'{"a":1},{"b":2}',
        b'{"a":1,"b":2},',
        b'{"a":[1,2,3]',
        b'{"a":[1,2,3]}}',
        b'{"a":1,"b":2,"a":3}',
        b'{"x":{"a":[1,2],"a":3}}',
        b'{"x":{"a":[1,2],"b":[{"c":1,"d":2,"c":3}]}}',
        b'{"a":[1,NaN]}',
        b'{"a":[1,2,\xff]}',
        b"[1,2,3]",
        b'{"a":1,2}',
        b'{"a":"x,y}',
    ],
)
def test_a_fault_between_two_pieces_is_found(body: bytes):
    expected = decoded(body, WHOLE)
    assert expected[0] == 400
    assert [decoded(body, size) for size in range(1, len(body) + 1)] == [expected] * len(body)


def test_no_step_decodes_more_than_a_piece_of_a_large_document(monkeypatch: pytest.MonkeyPatch):
    numbers = [random.Random(0).randrange(100_000) for _ in range(200_000)]
    value = {"prompt": [numbers[:100_000], numbers[100_000:]], "texts": ["x" * 50] * 1000, "n": 1}
    body = json.dumps(value).encode()
    document = decoding(body)
    sizes: list[int] = []
    windows: list[int] = []
    decode, without_escapes = json_body._DECODER.decode, json_body.without_escapes
    monkeypatch.setattr(json_body._DECODER, "decode", lambda text: (sizes.append(len(text)), decode(text))[1])
    monkeypatch.setattr(
        json_body, "without_escapes", lambda window: (windows.append(len(window)), without_escapes(window))[1]
    )
    num_steps = sum(1 for _ in document.run())
    assert document.value == value
    assert num_steps == len(windows) + len(sizes) - 1
    assert max(windows) <= json_body.WINDOW_BYTES + 1
    assert max(sizes) < json_pieces.PIECE_BYTES + 200
    assert len(sizes) >= len(body) // (json_pieces.PIECE_BYTES + 200)


def refusal(body: bytes, limits: JSONLimits) -> Any:
    try:
        decode_object(body, limits)
    except HTTPError as error:
        return error.answer.code, error.answer.message
    return None


STRUCTURES = [
    b'{"a":' + b"[" * 70 + b"]" * 70 + b"}",
    b'{"a":[' + b'"s",' * 60 + b"1]}",
    b'{"a":[' + b"[]," * 60 + b"1]}",
    b'{"a":[' + b"1.5e3," * 60 + b"1]}",
    b'{"a":' + b"7" * 641 + b"}",
    b'{"a":[' + b"1," * 5 + b"8" * 700 + b"]}",
    b'{"a":"' + bytes([92]) * 122 + b'"}',
    b'{"a":"' + bytes([92]) * 121 + b'"}',
    b'{"a":"' + rb"\ud83d\ude00" * 9 + b'"}',
    b'{"a":"' + rb"\ud83d\ude00" * 9 + rb"\ud83d" + b'"}',
    b'{"a":"' + rb"\ud83d\ude00" * 9 + rb"\ude00" + b'"}',
    b'{"a":"' + rb"\\ud83d" * 9 + b'"}',
]


@pytest.mark.parametrize("body", STRUCTURES)
def test_the_structure_is_the_same_whatever_the_size_of_a_window(body: bytes, monkeypatch: pytest.MonkeyPatch):
    limits = JSONLimits(max_nodes=50, max_strings=40, max_values=80)
    monkeypatch.setattr(json_pieces, "PIECE_BYTES", WHOLE)
    expected = refusal(body, limits)
    monkeypatch.setattr(json_pieces, "PIECE_BYTES", 1)
    for size in (*range(1, 30), 700, 1500):
        monkeypatch.setattr(json_body, "WINDOW_BYTES", size)
        assert refusal(body, limits) == expected
