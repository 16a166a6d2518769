"""Percentiles, rates and goodput of a run."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmstack_bench.agents import agent_values
from llmstack_bench.errors import BenchError
from llmstack_bench.load import LoadResult
from llmstack_bench.result import RequestResult

# vLLM's names: time to first token, time per output token, inter-token latency, end-to-end latency.
METRICS = ("ttft", "tpot", "itl", "e2el")
# A first token came as predicted within so much of the prediction, or within so many seconds.
PREDICTION_SHARE, PREDICTION_S = 0.25, 0.05
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
DEFAULT_PERCENTILES = (50.0, 90.0, 99.0)


def percentile(values: Sequence[float], percent: float) -> float:
    """The exact percentile of all values, interpolated linearly between the two nearest, as numpy does by default.

    Raises:
        ValueError: There are no values, or `percent` is outside of [0, 100].
    """
    if not values:
        raise ValueError("no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent {percent} is outside of [0, 100]")
    return _percentile_of_sorted(sorted(values), percent)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Latency targets in milliseconds; a request that meets all of them counts as good."""

    targets_ms: Mapping[str, float]

    @classmethod
    def parse(cls, pairs: Iterable[str]) -> Goodput:
        """Parses targets such as `ttft:200`, `tpot:50` and `e2el:3000`.

        Raises:
            BenchError: A pair is malformed, or its metric unknown.
        """
        targets: dict[str, float] = {}
        for pair in (part for text in pairs for part in text.split()):
            name, _, value = pair.partition(":")
            if name not in GOODPUT_METRICS:
                known = ", ".join(GOODPUT_METRICS)
                raise BenchError(f"--goodput {pair}: unknown metric '{name}', known are {known}", exit_code=2)
            targets[name] = _positive_number("--goodput", pair, value)
        return cls(targets)

    def is_met(self, result: RequestResult) -> bool:
        """Whether a request met every target. Failed requests never do; a single token has no TPOT to miss."""
        if result.error is not None:
            return False
        found = {"ttft": result.ttft_s, "tpot": result.tpot_s, "e2el": result.e2e_s}
        return all((found[name] or 0.0) * 1000 <= target for name, target in self.targets_ms.items())


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The metrics of one run.

    Attributes:
        values: Name to value, under the names of vLLM's result files: `output_throughput`, `p99_ttft_ms`, ...
        failures: Reason to number of failed requests.
        notes: Caveats about the values.
    """

    values: dict[str, float]
    failures: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON data."""
        return {**self.values, "failures": self.failures, "notes": self.notes}


def summarise(
    load: LoadResult,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    goodput: Goodput | None = None,
    server_cpu_s: float | None = None,
) -> RunSummary:
    """The metrics of a run: rates over wall-clock time, latencies over successful requests.

    `server_cpu_s`: Processor time that the server took meanwhile, if it is known.
    """
    completed = [result for result in load.results if result.error is None]
    values: dict[str, float] = {
        "duration": load.duration_s,
        "completed": len(completed),
        "failed": len(load.results) - len(completed),
        "max_in_flight": load.max_in_flight,
        "generator_cpu_s": load.generator_cpu_s,
        **_rates(completed, load.duration_s),
    }
    if goodput is not None and goodput.targets_ms:
        num_good = sum(map(goodput.is_met, load.results))
        values["request_goodput"] = _rate(num_good, load.duration_s)
        values["goodput_fraction"] = num_good / max(1, len(load.results))
    values |= _right_predictions(completed) | agent_values(completed)
    if server_cpu_s is not None:
        values["server_cpu_s"] = server_cpu_s
        values["server_cpu_ms_per_token"] = 1000 * server_cpu_s / max(1.0, values["total_output_tokens"])
    for name, samples in latencies_ms(completed).items():
        values |= _distribution(name, samples, percentiles)
    lags_ms = [result.lag_s * 1000 for result in load.results]
    values["p99_send_lag_ms"] = percentile(lags_ms, 99) if lags_ms else 0.0
    failures = Counter(result.error for result in load.results if result.error is not None)
    return RunSummary(values, dict(failures.most_common()), _notes(completed))


def latencies_ms(completed: Sequence[RequestResult]) -> dict[str, list[float]]:
    """Metric to its samples in milliseconds: one per request, for `itl` one per gap between tokens."""
    return {
        "ttft": [result.ttft_s * 1000 for result in completed if result.ttft_s is not None],
        "tpot": [result.tpot_s * 1000 for result in completed if result.tpot_s is not None],
        "itl": [gap_s * 1000 for result in completed for gap_s in result.token_gaps_s],
        "e2el": [result.e2e_s * 1000 for result in completed],
    }


def percentile_name(percent: float) -> str:
    """The name of a percentile in results, such as `p99` or `p99.9`."""
    return f"p{percent:g}"


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Parses a list of percentiles such as `50,90,99.9`.

    Raises:
        BenchError: A part is no number in [0, 100].
    """
    parts = [_number("--metric-percentiles", text, part) for part in text.split(",")]
    if not all(0 <= part <= 100 for part in parts):
        raise BenchError(f"--metric-percentiles {text}: must lie in [0, 100]", exit_code=2)
    return tuple(sorted(set(parts)))


def _rates(completed: Sequence[RequestResult], duration_s: float) -> dict[str, float]:
    num_input = sum(result.num_prompt_tokens or 0 for result in completed)
    num_output = sum(result.num_output_tokens for result in completed)
    return {
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": _rate(len(completed), duration_s),
        "input_throughput": _rate(num_input, duration_s),
        "output_throughput": _rate(num_output, duration_s),
        "total_token_throughput": _rate(num_input + num_output, duration_s),
    }


def _right_predictions(completed: Sequence[RequestResult]) -> dict[str, float]:
    """The share of first tokens that came when the server had said, of those it said it of."""
    pairs = [
        (result.predicted_ttft_s, result.ttft_s)
        for result in completed
        if result.predicted_ttft_s is not None and result.ttft_s is not None
    ]
    if not pairs:
        return {}
    num_kept = sum(abs(real_s - said_s) <= max(PREDICTION_SHARE * said_s, PREDICTION_S) for said_s, real_s in pairs)
    return {"predicted_ttfts": len(pairs), "predicted_ttft_fraction": num_kept / len(pairs)}


def _distribution(name: str, samples: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    if not samples:
        return {}
    ordered = sorted(samples)
    values = {
        f"mean_{name}_ms": statistics.fmean(ordered),
        f"median_{name}_ms": _percentile_of_sorted(ordered, 50),
        f"std_{name}_ms": statistics.pstdev(ordered),
    }
    return values | {
        f"{percentile_name(percent)}_{name}_ms": _percentile_of_sorted(ordered, percent) for percent in percentiles
    }


def _percentile_of_sorted(ordered: Sequence[float], percent: float) -> float:
    position = percent / 100 * (len(ordered) - 1)
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    low, high = ordered[lower], ordered[upper]
    # Clamped, so that rounding never moves the result past its neighbours.
    return min(max(low + (high - low) * (position - lower), low), high)


def _notes(completed: Sequence[RequestResult]) -> list[str]:
    notes = []
    num_uncounted = sum(not result.has_usage for result in completed)
    if num_uncounted:
        notes.append(f"{num_uncounted} answers had no usage: each chunk counts as one token, and their prompts as none")
    num_chunks = sum(result.num_chunks for result in completed)
    num_tokens = sum(result.num_output_tokens for result in completed)
    if num_chunks and num_tokens > 1.02 * num_chunks:
        ratio = num_tokens / num_chunks
        notes.append(f"chunks hold {ratio:.2f} tokens on average: ITL is between chunks unless the server counts each")
    return notes


def _rate(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _positive_number(flag: str, shown: str, text: str) -> float:
    number = _number(flag, shown, text)
    if not 0 < number < math.inf:
        raise BenchError(f"{flag} {shown}: must be a number above 0", exit_code=2)
    return number


def _number(flag: str, shown: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise BenchError(f"{flag} {shown}: '{text}' is not a number", exit_code=2) from error
