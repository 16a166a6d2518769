"""Replays traces of production: their arrivals, their lengths, and the prefixes their prompts share."""

from __future__ import annotations

import csv
import functools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from llmstack_bench.errors import BenchError
from llmstack_bench.workload import BenchRequest, TokenSource, check_total

TOKENS_PER_HASH_ID = 512
MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace.

    Attributes:
        arrival_s: Seconds since the trace began.
        hash_ids: Each stands for 512 tokens, the last one for what is left; equal ids stand for equal tokens. Empty
            where the prompt is unlike any other.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Requests after a trace.

    Attributes:
        speed: 2 sends them in half the time.
        length_scale: Factor for prompt and output lengths; prefixes stay shared in proportion.
        vocab_size: Token ids lie below it.
    """

    speed: float = 1.0
    length_scale: float = 1.0
    vocab_size: int = 256
    seed: int = 0

    def requests(self, trace: list[TraceRequest]) -> list[BenchRequest]:
        """The requests of a trace, each with its arrival.

        Raises:
            BenchError: A factor is not above 0, or the prompts together are too long.
        """
        for flag, value in (("--trace-speed", self.speed), ("--trace-length-scale", self.length_scale)):
            if not 0 < value < float("inf"):
                raise BenchError(f"{flag} {value}: must be above 0", exit_code=2)
        check_total(sum(self._scaled(request.num_prompt_tokens) for request in trace))
        block = functools.lru_cache(maxsize=4096)(self._block)
        return [
            BenchRequest(
                self._prompt(index, request, block),
                self._scaled(request.num_output_tokens),
                (request.arrival_s - trace[0].arrival_s) / self.speed,
            )
            for index, request in enumerate(trace)
        ]

    def _prompt(self, index: int, request: TraceRequest, block: Callable[[str], list[int]]) -> list[int]:
        num_tokens = self._scaled(request.num_prompt_tokens)
        if not request.hash_ids:
            return self._tokens(f"request {index}", num_tokens)
        prompt = [token_id for hash_id in request.hash_ids for token_id in block(f"block {hash_id}")]
        # Rounding may leave the blocks a few tokens short; the rest belongs to this prompt alone.
        return prompt[:num_tokens] + self._tokens(f"rest {index}", num_tokens - len(prompt))

    def _block(self, name: str) -> list[int]:
        return self._tokens(name, self._scaled(TOKENS_PER_HASH_ID))

    def _tokens(self, name: str, num_tokens: int) -> list[int]:
        rng = random.Random(f"{self.seed} {name}")  # noqa: S311 - a workload, not a secret
        return TokenSource(rng, self.vocab_size).draw(max(0, num_tokens))

    def _scaled(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self.length_scale))


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a file, by arrival.

    A name that ends with `.csv` holds a table of TIMESTAMP, ContextTokens and GeneratedTokens (Azure); any other one
    JSON object per line with timestamp (ms), input_length, output_length and hash_ids (Mooncake).

    Raises:
        BenchError: The file cannot be read, or a line is not of that format; the text names it.
    """
    parse = _parse_azure if path.suffix.lower() == ".csv" else _parse_mooncake
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            requests = list(islice(_numbered(path, parse(lines)), limit))
    except OSError as error:
        raise BenchError(f"--dataset-path {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BenchError(f"--dataset-path {path}: is no text") from error
    if not requests:
        raise BenchError(f"--dataset-path {path}: holds no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _numbered(path: Path, requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    """The same, with the place in the errors."""
    number = 0
    while True:
        number += 1
        try:
            request = next(requests)
        except StopIteration:
            return
        except (ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise BenchError(f"--dataset-path {path}: request {number} cannot be read: {reason}") from error
        yield request


def _parse_mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for line in lines:
        if line.strip():
            yield _mooncake_request(json.loads(line))


def _mooncake_request(named: dict[str, Any]) -> TraceRequest:
    request = TraceRequest(
        _seconds(named["timestamp"]),
        _count(named["input_length"], "input_length", 1),
        _count(named["output_length"], "output_length", 0),
        tuple(_count(hash_id, "hash_ids", 0, 1 << 64) for hash_id in named.get("hash_ids", ())),
    )
    num_ids = len(request.hash_ids)
    if num_ids and -(-request.num_prompt_tokens // TOKENS_PER_HASH_ID) != num_ids:
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
