"""Lines of a batch's input and output."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from llmstack_server.apis.batches import lines
from llmstack_server.apis.batches.lines import BatchAnswer, BatchFault, BatchRequest, read_lines

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def read(*entries: Any) -> list[BatchRequest | BatchFault]:
    texts = [entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in entries]
    return list(read_lines(io.BytesIO(b"\n".join(texts))))


def test_requests_come_in_order_with_their_line_numbers():
    found = read(GOOD, b"", {**GOOD, "custom_id": "b"})
    assert found == [
        BatchRequest(1, "a", "/v1/completions", {"prompt": "x"}),
        BatchRequest(3, "b", "/v1/completions", {"prompt": "x"}),
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
        (b'{"custom_id": "\\ud800"}', "invalid_custom_id", None),
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


def test_a_line_that_is_too_long_is_skipped_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    long, short = read({**GOOD, "body": {"prompt": "x" * 1000}}, {**GOOD, "custom_id": "b"})
    assert isinstance(long, BatchFault)
    assert long.code == "line_too_long"
    assert isinstance(short, BatchRequest)
    assert short.line == 2


def test_an_answer_has_the_form_of_openais_batches():
    line = json.loads(BatchAnswer(200, "req-1", {"text": "ü"}).encode(BatchRequest(1, "a", "/x", {})))
    assert line.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req-1", "body": {"text": "ü"}}
    assert line == {"custom_id": "a", "response": response, "error": None}


def test_a_fault_has_the_form_of_openais_batches():
    line = json.loads(BatchFault(7, None, "invalid_json_line", "no").encode())
    assert line.pop("id").startswith("batch_req_")
    error = {"code": "invalid_json_line", "message": "no", "line": 7}
    assert line == {"custom_id": None, "response": None, "error": error}
