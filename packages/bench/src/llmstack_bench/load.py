"""Load generation: timed sends, a concurrency limit, and the results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmstack_bench.client import CompletionClient
from llmstack_bench.result import RequestResult

Progress = Callable[[RequestResult], object]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The results of one run.

    Attributes:
        results: One for each request, in their order, failed requests included.
        duration_s: From the first request sent to the end of the last.
        generator_cpu_s: Processor time the load generator itself took.
        max_in_flight: The largest number of simultaneous requests.
    """

    results: list[RequestResult]
    duration_s: float
    generator_cpu_s: float = 0.0
    max_in_flight: int = 0


@dataclass(slots=True)
class _InFlight:
    """Counts open requests, and delays new ones at the limit."""

    gate: asyncio.Semaphore | None
    count: int = 0
    highest: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def enter(self) -> None:
        if self.gate is not None:
            await self.gate.acquire()
        self.count += 1
        self.highest = max(self.highest, self.count)

    def leave(self) -> None:
        self.count -= 1
        if self.gate is not None:
            self.gate.release()


async def run_load(
    client: CompletionClient,
    bodies: Sequence[bytes],
    arrivals_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_result: Progress | None = None,
) -> LoadResult:
    """Sends `bodies[i]` at `arrivals_s[i]` seconds, or later if the limit requires it.

    Times are measured from the moment a request is sent, so waiting for the limit is not part of a latency.

    `max_concurrency`: Maximum number of requests in flight; None means no limit.
    `on_result`: Called with each result when its request ends.
    """
    results: list[RequestResult | None] = [None] * len(bodies)
    in_flight = _InFlight(asyncio.Semaphore(max_concurrency) if max_concurrency else None)
    started_cpu_s, started_s = time.process_time(), time.perf_counter()

    async def send(index: int, planned_s: float) -> None:
        try:
            result = await client.send(bodies[index], started_s, planned_s)
        finally:
            in_flight.leave()
        results[index] = result
        if on_result is not None:
            on_result(result)

    async with asyncio.TaskGroup() as group:
        for index, arrival_s in enumerate(arrivals_s):
            await _sleep_until(started_s + arrival_s)
            await in_flight.enter()
            # A request that the limit delays is not late: the limit is part of the plan.
            planned_s = arrival_s if max_concurrency is None else time.perf_counter() - started_s
            group.create_task(send(index, planned_s))
    done = [result for result in results if result is not None]
    return LoadResult(done, duration_s(done), time.process_time() - started_cpu_s, in_flight.highest)


def duration_s(results: Sequence[RequestResult]) -> float:
    """From the first request sent to the end of the last."""
    if not results:
        return 0.0
    return max(result.start_s + result.e2e_s for result in results) - min(result.start_s for result in results)


async def _sleep_until(when_s: float) -> None:
    # Timers of event loops have a resolution of a millisecond and may fire early, hence the loop.
    while (delay_s := when_s - time.perf_counter()) > 0:  # noqa: ASYNC110 - a time is waited for, not a state
        await asyncio.sleep(delay_s)
