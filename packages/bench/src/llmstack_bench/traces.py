"""Replay of production traces: arrivals, lengths and shared prefixes."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmstack_bench.errors import BenchError
from llmstack_bench.workload import BenchRequest, TokenSource, check_total
from llmstack_types.traces import TOKENS_PER_HASH_ID, TraceFormat, TraceRequest, parse_trace


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Settings for the requests made from a trace.

    Attributes:
        speed: Factor for the arrival rate: 2 sends the requests in half the time.
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
        if request.hash_ids is None:
            return self._tokens(f"request {index}", num_tokens)
        prompt = [token_id for hash_id in request.hash_ids for token_id in block(f"block {hash_id}")]
        # Rounding may leave the blocks a few tokens short; the remainder is unique to this prompt.
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
