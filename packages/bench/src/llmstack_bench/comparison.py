"""Interleaved measurement of several servers, with medians and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmstack_bench.load import LoadResult
from llmstack_bench.metrics import RunSummary


@dataclass(frozen=True, slots=True)
class Run:
    """One repetition on one server.

    Attributes:
        bandwidth_gb_per_s: Memory bandwidth just before the run; None if it was not requested.
    """

    load: LoadResult
    summary: RunSummary
    bandwidth_gb_per_s: float | None = None


@dataclass(slots=True)
class Server:
    """One server under test, and its runs.

    Attributes:
        pid: Its process, which is stopped while another server is measured; 0 leaves it running.
        gets_pictures: Whether it is sent the pictures of a workload; a server is measured without them too.
    """

    label: str
    base_url: str
    model: str = ""
    runs: list[Run] = field(default_factory=list)
    pid: int = 0
    gets_pictures: bool = True

    def medians(self) -> dict[str, float]:
        """Metric name to its median over the repetitions."""
        return {name: statistics.median(values) for name, values in _columns(self).items()}

    def to_json(self, first: Server, *, is_detailed: bool = False) -> dict[str, Any]:
        """The server as JSON data; `is_detailed` adds a record for every request."""
        return {
            "label": self.label,
            "base_url": self.base_url,
            "model": self.model,
            "median": self.medians(),
            "ratio_to_first": ratios(self, first),
            "runs": [_run_json(run, is_detailed) for run in self.runs],
        }


Measure = Callable[[Server, int], Coroutine[Any, Any, Run]]


async def measure_interleaved(servers: Sequence[Server], num_repetitions: int, measure: Measure) -> None:
    """Calls `measure(server, repetition)` for all servers, one at a time, and stores the runs.

    The order alternates (A B, B A, ...), so that a machine which slows down favours no server.
    """
    for repetition in range(num_repetitions):
        for server in servers if repetition % 2 == 0 else reversed(servers):
            server.runs.append(await measure(server, repetition))


def ratios(server: Server, first: Server) -> dict[str, float]:
    """Metric name to the median ratio of neighbouring runs, which ran under the same conditions."""
    own, others = _columns(server), _columns(first)
    found = {}
    for name in own.keys() & others.keys():
        pairs = [value / other for value, other in zip(own[name], others[name], strict=False) if other]
        if pairs:
            found[name] = statistics.median(pairs)
    return dict(sorted(found.items()))


def _columns(server: Server) -> dict[str, list[float]]:
    """Metric name to one value per repetition, for the metrics that every repetition has."""
    summaries = [run.summary.values for run in server.runs]
    names = [name for name in (summaries[0] if summaries else {}) if all(name in values for values in summaries)]
    return {name: [values[name] for values in summaries] for name in names}


def _run_json(run: Run, is_detailed: bool) -> dict[str, Any]:
    data = run.summary.to_json()
    if run.bandwidth_gb_per_s is not None:
        data["memory_read_gb_per_s"] = run.bandwidth_gb_per_s
    if is_detailed:
        data["requests"] = [result.to_json() for result in run.load.results]
    return data
