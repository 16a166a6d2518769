"""Reads traces of production: when requests came, how long they were, and which prefixes they shared."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

from llmstack_engine_core.simulate.errors import SimulationError

TOKENS_PER_HASH_ID = 512
MAX_TOKENS = 1 << 24


class TraceFormat(StrEnum):
    """Whose trace it is."""

    MOONCAKE = "mooncake"
    """One JSON object per line, prompts as ids of 512 tokens each, times in milliseconds."""
    AZURE = "azure"
    """A table of time, prompt length and output length; prompts share nothing."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: Seconds since the trace began.
        hash_ids: Each stands for 512 tokens, the last one for what is left; equal ids stand for equal tokens. None
            where the prompt is unlike any other.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] | None = None


def read_trace(path: Path, trace_format: TraceFormat, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a file, by arrival.

    Raises:
        SimulationError: The file cannot be read, or a line is not of that format; the text names it.
    """
    parse = _parse_mooncake if trace_format is TraceFormat.MOONCAKE else _parse_azure
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            requests = list(islice(_numbered(path, parse(lines)), limit))
    except OSError as error:
        raise SimulationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SimulationError(f"{path} is no text") from error
    if not requests:
        raise SimulationError(f"{path} holds no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _numbered(path: Path, requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    """The same, with the place in the errors."""
    for number in range(1, 1 << 62):
        try:
            yield next(requests)
        except StopIteration:
            return
        except (ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise SimulationError(f"{path}: request {number} cannot be read: {reason}") from error


def _parse_mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for line in lines:
        if line.strip():
            yield _mooncake_request(json.loads(line))


def _mooncake_request(named: dict[str, Any]) -> TraceRequest:
    request = TraceRequest(
        _seconds(named["timestamp"]),
        _count(named["input_length"], "input_length", 1),
        _count(named["output_length"], "output_length", 0),
        tuple(_count(hash_id, "hash_ids", 0, 1 << 64) for hash_id in named["hash_ids"]),
    )
    num_ids = len(request.hash_ids or ())
    if -(-request.num_prompt_tokens // TOKENS_PER_HASH_ID) != num_ids:
        raise ValueError(f"{num_ids} hash ids cannot stand for {request.num_prompt_tokens} tokens")
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


def _count(value: Any, name: str, low: int, high: int = MAX_TOKENS) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}]")
    return value
