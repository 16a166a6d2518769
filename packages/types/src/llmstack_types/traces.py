"""Production traces of requests: arrival, lengths and shared prefixes.

The load generator and the simulator replay the same files, so the two published formats are parsed here, once.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import islice
from typing import Any

TOKENS_PER_HASH_ID = 512
MAX_TRACE_TOKENS = 1 << 24


class TraceFormat(StrEnum):
    """The publisher of a trace, which decides its format."""

    MOONCAKE = "mooncake"
    """One JSON object per line, prompts as ids of 512 tokens each, times in milliseconds."""
    AZURE = "azure"
    """A CSV table of time, prompt length and output length, without shared prefixes."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: Seconds since the trace began.
        hash_ids: Each stands for 512 tokens, the last one for the remainder; equal ids stand for equal tokens. None if
            the prompt shares no prefix with another.
        ends_with_call: Whether the answer calls a tool.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    ends_with_call: bool = False


def parse_trace(lines: Iterable[str], trace_format: TraceFormat, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace, ordered by arrival.

    Raises:
        ValueError: A line is not of that format, or there is no request; the text names the request.
        UnicodeDecodeError: The lines come from a file that is not UTF-8.
    """
    parse = _parse_mooncake if trace_format is TraceFormat.MOONCAKE else _parse_azure
    requests = list(islice(_with_number_in_errors(parse(lines)), limit))
    if not requests:
        raise ValueError("holds no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _with_number_in_errors(requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    for number in range(1, 1 << 62):
        try:
            yield next(requests)
        except StopIteration:
            return
        except UnicodeDecodeError:
            raise
        except KeyError as error:
            raise ValueError(f"request {number} cannot be read: it has no {error.args[0]}") from error
        except (ValueError, TypeError, OverflowError, csv.Error) as error:
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise ValueError(f"request {number} cannot be read: {reason}") from error


def _parse_mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for line in lines:
        if line.strip():
            yield _mooncake_request(json.loads(line))


def _mooncake_request(fields: dict[str, Any]) -> TraceRequest:
    hash_ids = tuple(_count(hash_id, "hash_ids", 0, 1 << 64) for hash_id in fields["hash_ids"])
    request = TraceRequest(
        _seconds(fields["timestamp"]),
        _count(fields["input_length"], "input_length", 1),
        _count(fields["output_length"], "output_length", 0),
        hash_ids,
    )
    if -(-request.num_prompt_tokens // TOKENS_PER_HASH_ID) != len(hash_ids):
        raise ValueError(f"{len(hash_ids)} hash ids cannot stand for {request.num_prompt_tokens} tokens")
    return request


def _parse_azure(lines: Iterable[str]) -> Iterator[TraceRequest]:
    first: datetime | None = None
    for row in csv.DictReader(lines):
        time = datetime.fromisoformat(row["TIMESTAMP"])
        first = first or time
        yield TraceRequest(
            (time - first).total_seconds(),
            _count(int(row["ContextTokens"]), "ContextTokens", 1),
            _count(int(row["GeneratedTokens"]), "GeneratedTokens", 0),
        )


def _seconds(milliseconds: Any) -> float:
    if type(milliseconds) not in (int, float) or not 0 <= milliseconds < 1e15:
        raise ValueError("timestamp must be a number of milliseconds")
    return float(milliseconds) / 1000


def _count(value: Any, name: str, low: int, high: int = MAX_TRACE_TOKENS) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}]")
    return value
