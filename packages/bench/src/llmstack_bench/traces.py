"""Replay of production traces: arrivals, lengths and shared prefixes."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from llmstack_bench.errors import BenchError
from llmstack_bench.workload import BenchRequest, TokenSource, check_total
from llmstack_types.traces import MAX_TRACE_TOKENS, TOKENS_PER_HASH_ID, TraceFormat, TraceRequest, parse_trace

MAX_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Settings for the requests made from a trace.

    Attributes:
        speed: Factor for the arrival rate: 2 sends the requests in half the time.
        length_scale: Factor for prompt and output lengths; prefixes stay shared in proportion.
        vocab_size: Token ids lie below it.
        num_block_tokens: The tokens of a block, which a hash id of the trace stands for.
    """

    speed: float = 1.0
    length_scale: float = 1.0
    vocab_size: int = 256
    seed: int = 0
    num_block_tokens: int = TOKENS_PER_HASH_ID

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
        if request.hash_ids is None:
            return self._tokens(f"request {index}", num_tokens)
        prompt = [token_id for hash_id in request.hash_ids for token_id in block(f"block {hash_id}")]
        # Rounding may leave the blocks a few tokens short; the remainder is unique to this prompt.
        return prompt[:num_tokens] + self._tokens(f"rest {index}", num_tokens - len(prompt))

    def _block(self, name: str) -> list[int]:
        return self._tokens(name, self._scaled(self.num_block_tokens))

    def _tokens(self, name: str, num_tokens: int) -> list[int]:
        rng = random.Random(f"{self.seed} {name}")  # noqa: S311 - a workload, not a secret
        return TokenSource(rng, self.vocab_size).draw(max(0, num_tokens))

    def _scaled(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self.length_scale))


@dataclass(frozen=True, slots=True)
class TimedTraceFormat:
    """The keys and units of a trace in vLLM's form: a JSON object per line.

    Attributes:
        timestamp, input_length, output_length, hash_ids: The keys of a line; it may lack hash ids.
        sec_multiplier: Seconds that a unit of its times is.
    """

    timestamp: str = "timestamp"
    input_length: str = "input_length"
    output_length: str = "output_length"
    hash_ids: str = "hash_ids"
    sec_multiplier: float = 1.0

    def request(self, fields: Mapping[str, Any]) -> TraceRequest:
        """One line of the file.

        Raises:
            ValueError: A number is missing, or out of range.
        """
        hash_ids = fields.get(self.hash_ids)
        if hash_ids is not None and not (isinstance(hash_ids, list) and all(type(one) is int for one in hash_ids)):
            raise ValueError(f"{self.hash_ids} must be a list of integers")
        time = fields.get(self.timestamp)
        if not isinstance(time, (int, float)) or not 0 <= time * self.sec_multiplier < MAX_SECONDS:
            raise ValueError(f"{self.timestamp} must be a time of at least 0")
        return TraceRequest(
            time * self.sec_multiplier,
            _num_tokens(fields, self.input_length),
            _num_tokens(fields, self.output_length),
            None if hash_ids is None else tuple(hash_ids),
        )


def _num_tokens(fields: Mapping[str, Any], name: str) -> int:
    number = fields.get(name)
    if not isinstance(number, int) or not 0 < number <= MAX_TRACE_TOKENS:
        raise ValueError(f"{name} must be a number of tokens above 0")
    return number


def timed_requests(
    path: Path, rows: Iterable[Mapping[str, Any]], trace_format: TimedTraceFormat, limit: int
) -> list[TraceRequest]:
    """The first `limit` rows as requests, by arrival.

    Raises:
        BenchError: A row is not of that format; the text names it.
    """
    found = []
    for number, row in enumerate(islice(rows, limit), 1):
        try:
            found.append(trace_format.request(row))
        except (TypeError, ValueError) as error:
            raise BenchError(f"--dataset-path {path}: line {number}: {error}", exit_code=2) from error
    if not found:
        raise BenchError(f"--dataset-path {path}: holds no requests", exit_code=2)
    return sorted(found, key=lambda request: request.arrival_s)


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a file, by arrival.

    The suffix `.csv` means Azure's table of TIMESTAMP, ContextTokens and GeneratedTokens. Every other file holds one
    JSON object per line with timestamp (ms), input_length, output_length and hash_ids, as Mooncake publishes them.

    Raises:
        BenchError: The file cannot be read, or a line is not of that format; the text names it.
    """
    trace_format = TraceFormat.AZURE if path.suffix.lower() == ".csv" else TraceFormat.MOONCAKE
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return parse_trace(lines, trace_format, limit)
    except OSError as error:
        raise BenchError(f"--dataset-path {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BenchError(f"--dataset-path {path}: is not UTF-8 text") from error
    except ValueError as error:
        raise BenchError(f"--dataset-path {path}: {error}") from error
