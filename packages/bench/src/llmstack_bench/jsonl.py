"""Requests from the user's own file, one JSON object per line."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from llmstack_bench.errors import BenchError
from llmstack_bench.workload import BenchRequest, Message

MAX_LINE_BYTES = 64 << 20
_FIELDS = ("prompt", "prompt_token_ids", "messages")


def read_requests(path: Path, limit: int | None = None, default_output_tokens: int = 128) -> list[BenchRequest]:
    """The first `limit` requests of a file.

    A line has one of `prompt` (text), `prompt_token_ids` and `messages`, and may have `output_tokens` and `timestamp`
    (milliseconds since the run began).

    Raises:
        BenchError: The file cannot be read, or a line has another format; the text names it.
    """
    try:
        with path.open("rb") as lines:
            parsed = (
                _request(path, number, line, default_output_tokens)
                for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b""), 1)
                if line.strip()
            )
            requests = list(islice(parsed, limit))
    except OSError as error:
        raise BenchError(f"--dataset-path {path}: {error.strerror}") from error
    if not requests:
        raise BenchError(f"--dataset-path {path}: holds no requests")
    return requests


def _request(path: Path, number: int, line: bytes, default_output_tokens: int) -> BenchRequest:
    try:
        named = json.loads(line)
        if not isinstance(named, dict):
            raise TypeError("is not an object")
        output_tokens = named.get("output_tokens", default_output_tokens)
        if type(output_tokens) is not int or output_tokens < 1:
            raise ValueError("output_tokens must be an integer above 0")
        return BenchRequest(_prompt(named), output_tokens, _arrival_s(named))
    except (ValueError, TypeError) as error:
        raise BenchError(f"--dataset-path {path}: line {number}: {error}") from error


def _prompt(named: dict[str, Any]) -> str | list[int] | list[Message]:
    present = [name for name in _FIELDS if name in named]
    if len(present) != 1:
        raise ValueError(f"one of {', '.join(_FIELDS)} is needed")
    value = named[present[0]]
    if present[0] == "prompt":
        if not isinstance(value, str) or not value:
            raise ValueError("prompt must be text")
        return value
    wanted = int if present[0] == "prompt_token_ids" else dict
    if not isinstance(value, list) or not value or any(type(entry) is not wanted for entry in value):
        raise ValueError(f"{present[0]} must be a list of {'integers' if wanted is int else 'objects'}")
    return value


def _arrival_s(named: dict[str, Any]) -> float | None:
    milliseconds = named.get("timestamp")
    if milliseconds is None:
        return None
    if type(milliseconds) not in (int, float) or not 0 <= milliseconds < 1e15:
        raise ValueError("timestamp must be a number of milliseconds")
    return float(milliseconds) / 1000
