"""Lines of a batch's input and output."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.apis.batches.lines import (
    MAX_BODY_BYTES,
    BatchAnswer,
    BatchFault,
    BatchRequest,
    line_steps,
    read_lines,
)

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def read(*entries: Any, max_body_bytes: int = MAX_BODY_BYTES) -> list[BatchRequest | BatchFault]:
    texts = [entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in entries]
    return list(read_lines(io.BytesIO(b"\n".join(texts)), max_body_bytes))


def test_requests_come_in_order_with_their_line_numbers():
    found = read(GOOD, b"", {**GOOD, "custom_id": "b"})
    assert found == [
        BatchRequest(1, "a", "/v1/completions", b'{"prompt": "x"}'),
        BatchRequest(3, "b", "/v1/completions", b'{"prompt": "x"}'),
    ]


@pytest.mark.parametrize(
    ("entry", "code", "custom_id"),
    [
        (b"{oops", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        ({**GOOD, "custom_id": 5}, "invalid_custom_id", None),
        ({**GOOD, "custom_id": ""}, "invalid_custom_id", None),
        ({**GOOD, "custom_id": "x" * 513}, "invalid_custom_id", None),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
        ({**GOOD, "method": "GET"}, "invalid_method", "a"),
        ({**GOOD, "url": "http://elsewhere/v1/completions"}, "invalid_url", "a"),
        ({**GOOD, "url": "/v1/x\r\nHost: y"}, "invalid_url", "a"),
        ({**GOOD, "url": "/v1/completions and"}, "invalid_url", "a"),
        ({**GOOD, "url": None}, "invalid_url", "a"),
        ({**GOOD, "body": "text"}, "invalid_body", "a"),
        ({**GOOD, "body": {"stream": True}}, "unsupported_parameter", "a"),
    ],
)
def test_a_wrong_line_is_a_fault_that_says_which(entry: Any, code: str, custom_id: str | None):
    wrong, right = read(entry, {**GOOD, "custom_id": "b"})
    assert isinstance(wrong, BatchFault)
    assert (wrong.line, wrong.custom_id, wrong.code) == (1, custom_id, code)
    assert isinstance(right, BatchRequest)


def test_the_second_line_of_one_custom_id_is_a_fault():
    first, second = read(GOOD, {**GOOD, "body": {"prompt": "y"}})
    assert isinstance(first, BatchRequest)
    assert isinstance(second, BatchFault)
    assert second.code == "duplicate_custom_id"


def test_a_line_that_is_too_long_is_skipped_whole():
    long, short = read({**GOOD, "body": {"prompt": "x" * 300_000}}, {**GOOD, "custom_id": "b"}, max_body_bytes=100)
    assert isinstance(long, BatchFault)
    assert long.code == "line_too_long"
    assert isinstance(short, BatchRequest)
    assert short.line == 2


def test_an_answer_has_the_form_of_openais_batches():
    line = json.loads(BatchAnswer(200, "req-1", {"text": "ü"}).encode(BatchRequest(1, "a", "/x", b"{}")))
    assert line.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req-1", "body": {"text": "ü"}}
    assert line == {"custom_id": "a", "response": response, "error": None}


def test_a_fault_has_the_form_of_openais_batches():
    line = json.loads(BatchFault(7, None, "invalid_json_line", "no").encode())
    assert line.pop("id").startswith("batch_req_")
    error = {"code": "invalid_json_line", "message": "no", "line": 7}
    assert line == {"custom_id": None, "response": None, "error": error}


def test_a_long_line_is_read_in_many_steps():
    values = json.dumps({**GOOD, "body": {"prompt": list(range(200_000))}}).encode()
    steps = list(line_steps(io.BytesIO(values + b"\n" + values.replace(b'"a"', b'"b"'))))
    found = [item for item in steps if item is not None]
    assert [json.loads(item.content) for item in found if isinstance(item, BatchRequest)] == [
        {"prompt": list(range(200_000))}
    ] * 2
    assert steps.count(None) > 100


@pytest.mark.parametrize(
    "body",
    [
        b'{"x":[' + b"[]," * 70_000 + b"[]]}",
        b'{"x":' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"x":NaN}',
        b'{"x":1,"x":2}',
        b'{"x":"\\ud800"}',
    ],
    ids=["nodes", "depth", "NaN", "a key twice", "half a pair"],
)
def test_a_line_passes_the_limits_of_a_body(body: bytes):
    line = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":' + body + b"}"
    (wrong,) = read(line, max_body_bytes=4 << 20)
    assert isinstance(wrong, BatchFault)
    assert wrong.code == "invalid_json_line"
    assert wrong.message.startswith("The line cannot be read. ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text().filter(lambda key: key != "stream"), JSON, max_size=5))
def test_a_body_is_sent_as_it_is(body: dict[str, Any]):
    try:
        line = json.dumps({**GOOD, "body": body}, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return  # half a surrogate pair is no text
    (found,) = read_lines(io.BytesIO(line))
    assert isinstance(found, BatchRequest)
    assert json.loads(found.content) == body


@given(st.binary(max_size=300))
def test_any_bytes_are_requests_or_faults_with_the_numbers_of_their_lines(content: bytes):
    for item in read_lines(io.BytesIO(content), 100):
        assert isinstance(item, BatchFault)
        assert 1 <= item.line <= content.count(b"\n") + 1
