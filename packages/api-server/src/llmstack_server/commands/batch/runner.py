"""Requests of a batch, a bounded number in flight, answers written as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.apis.batches.lines import BatchAnswer, BatchFault, BatchRequest
from llmstack_server.apis.batches.output import BatchOutput
from llmstack_server.apis.batches.transport import Transport, TransportError

# Statuses of a server that is busy; every other status is an answer.
RETRIED_STATUSES = frozenset({429, 503})
RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(slots=True)
class Counts:
    """Counts of the lines of a batch, by outcome."""

    num_ok: int = 0
    num_refused: int = 0
    num_faults: int = 0
    num_skipped: int = 0

    def __str__(self) -> str:
        """The counts that are not zero, as one line."""
        parts = [f"{self.num_ok} answered"] if self.num_ok else []
        parts += [f"{self.num_refused} answered with an error"] if self.num_refused else []
        parts += [f"{self.num_faults} wrong lines"] if self.num_faults else []
        parts += [f"{self.num_skipped} already in the output"] if self.num_skipped else []
        return ", ".join(parts) or "no requests"


class BatchRunner:
    """Sends the requests of one batch and writes their answers."""

    def __init__(
        self,
        transport: Transport,
        output: BatchOutput,
        on_line: Callable[[], object],
        retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S,
    ) -> None:
        """`on_line` is called for each line of the input that is complete."""
        self._transport = transport
        self._output = output
        self._on_line = on_line
        self._retry_delays_s = retry_delays_s
        self.counts = Counts()

    async def run(self, items: Iterable[BatchRequest | BatchFault], max_concurrency: int) -> Counts:
        """Answers every line that has no answer yet, `max_concurrency` at once.

        Raises:
            BatchError: The batch cannot continue; a later run can.
        """
        shared = iter(items)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(max_concurrency):
                    group.create_task(self._work(shared))
        except ExceptionGroup as errors:  # no `except*`: early versions of Python 3.11 wrap what it raises
            failed = errors.subgroup(BatchError)
            if failed is None:
                raise
            raise BatchError(str(failed.exceptions[0])) from errors
        return self.counts

    async def _work(self, items: Iterator[BatchRequest | BatchFault]) -> None:
        for item in items:
            if self._output.answered.covers(item):
                self.counts.num_skipped += 1
            elif isinstance(item, BatchFault):
                self.counts.num_faults += 1
                self._output.append(item.encode())
            else:
                await self._answer(item)
            self._on_line()

    async def _answer(self, request: BatchRequest) -> None:
        answer = await self._send(request)
        if answer.status == 200:
            self.counts.num_ok += 1
        else:
            self.counts.num_refused += 1
        self._output.append(answer.encode(request))

    async def _send(self, request: BatchRequest) -> BatchAnswer:
        """Sends a request, and retries with a delay where the server is busy or cannot be reached."""
        for delay_s in self._retry_delays_s:
            try:
                answer = await self._transport.send(request)
            except TransportError:
                pass
            else:
                if answer.status not in RETRIED_STATUSES:
                    return answer
            await asyncio.sleep(delay_s)
        try:
            return await self._transport.send(request)
        except TransportError as error:
            raise BatchError(f"no answer after several attempts: {error}") from error
