"""Production traces: both formats, and what is refused."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from llmstack_types.traces import TraceFormat, TraceRequest, parse_trace

ROW = {"timestamp": 1000, "input_length": 600, "output_length": 50, "hash_ids": [0, 1]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5000000,30,4\n2023-11-16 18:15:48.0000000,31,1\n"


def test_a_mooncake_trace_is_ordered_by_arrival() -> None:
    lines = [json.dumps({**ROW, "timestamp": 3000}), "", json.dumps(ROW)]
    assert parse_trace(lines, TraceFormat.MOONCAKE) == [
        TraceRequest(1.0, 600, 50, (0, 1)),
        TraceRequest(3.0, 600, 50, (0, 1)),
    ]


def test_an_azure_trace_counts_time_from_its_first_row_and_shares_nothing() -> None:
    assert parse_trace(io.StringIO(AZURE), TraceFormat.AZURE) == [
        TraceRequest(0.0, 30, 4, None),
        TraceRequest(1.5, 31, 1, None),
    ]


def test_no_line_after_the_limit_is_read() -> None:
    assert len(parse_trace([json.dumps(ROW), json.dumps(ROW), "{]"], TraceFormat.MOONCAKE, limit=2)) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hash_ids": [0]}, "1 hash ids cannot stand for 600 tokens"),
        ({"hash_ids": []}, "0 hash ids cannot stand for 600 tokens"),
        ({"hash_ids": [0, True]}, "hash_ids must be an integer"),
        ({"input_length": 0}, "input_length must be an integer in"),
        ({"output_length": -1}, "output_length must be an integer in"),
        ({"timestamp": "now"}, "timestamp must be a number of milliseconds"),
        ({"timestamp": -1}, "timestamp must be a number of milliseconds"),
    ],
)
def test_a_wrong_field_is_named_with_its_request(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"request 2 cannot be read: {reason}"):
        parse_trace([json.dumps(ROW), json.dumps({**ROW, **change})], TraceFormat.MOONCAKE)


@pytest.mark.parametrize("line", ["{]", "[1, 2]", "{}", '{"timestamp": 0, "input_length": 5, "output_length": 1}'])
def test_a_line_that_is_no_request_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="request 1 cannot be read"):
        parse_trace([line], TraceFormat.MOONCAKE)


@pytest.mark.parametrize(
    ("text", "trace_format", "field"),
    [("a,b\n1,2\n", TraceFormat.AZURE, "TIMESTAMP"), ('{"hash_ids": []}\n', TraceFormat.MOONCAKE, "timestamp")],
)
def test_a_field_that_is_missing_is_named(text: str, trace_format: TraceFormat, field: str) -> None:
    with pytest.raises(ValueError, match=f"request 1 cannot be read: it has no {field}"):
        parse_trace(io.StringIO(text), trace_format)


@pytest.mark.parametrize("trace_format", TraceFormat)
def test_a_trace_without_requests_is_refused(trace_format: TraceFormat) -> None:
    with pytest.raises(ValueError, match="holds no requests"):
        parse_trace([], trace_format)


def test_a_file_that_is_not_text_raises_the_error_of_its_decoder() -> None:
    with pytest.raises(UnicodeDecodeError):
        parse_trace(io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00"), encoding="utf-8"), TraceFormat.MOONCAKE)
