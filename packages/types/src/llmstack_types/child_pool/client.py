"""Client of a process that works on jobs in children."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmstack_types.child_environment import without_secrets
from llmstack_types.errors import ServerOverloadedError

_MAX_LINE_BYTES = 1 << 20
_NUM_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one job.

    Attributes:
        answer: What the work returned; None where the child has ended without an answer.
        is_late: It has used up its processor time.
        is_starved: The machine was too busy to give it that.
        processor_s: The processor time that it has used, in seconds.
    """

    answer: dict[str, Any] | None
    is_late: bool
    is_starved: bool
    processor_s: float


class ChildPool:
    """Starts a process with the first job or before, and again where it has ended. For one event loop."""

    def __init__(
        self,
        module: str,
        configuration: dict[str, Any],
        *,
        purpose: str,
        reason: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """The process begins with `start` or the first job.

        Args:
            module: What it runs, which calls `serve_children`.
            configuration: What its `prepare` gets; plain data.
            purpose: What it does, for messages: "compiles constraints".
            reason: The label of the refusals' metric.
            variables: Further variables of its environment.
        """
        self._module = module
        self._purpose = purpose
        self._reason = reason
        self._variables = dict(variables or {})
        self._configuration = json.dumps(configuration)
        self._starting = asyncio.Lock()
        self._connection: _Connection | None = None
        self._is_shut_down = False

    @property
    def process(self) -> asyncio.subprocess.Process | None:
        """The process, where one has been started."""
        return None if self._connection is None else self._connection.process

    async def start(self) -> None:
        """Starts the process before the first job, which then does not wait for what it imports.

        Raises:
            ServerOverloadedError: It cannot be started, or is shut down.
        """
        await self._living_connection()

    async def run(self, job: dict[str, Any], *, limit_s: float, is_slow: bool) -> Outcome:
        """Has one job done; `limit_s`: Its processor time. It is tried again where the process ends meanwhile: each
        job has a child of its own, so that this is the fault of none.

        Raises:
            ServerOverloadedError: The process has ended again, cannot be started, or is shut down.
        """
        line = {"job": job, "limit_s": limit_s, "is_slow": is_slow}
        for _ in range(_NUM_ATTEMPTS):
            outcome = await (await self._living_connection()).run(line)
            if outcome is not None:
                return outcome
        raise self._refusal("has ended")

    async def shutdown(self) -> None:
        """Ends the process and its children. Idempotent, and final."""
        self._is_shut_down = True
        async with self._starting:  # one that is being started ends too
            connection, self._connection = self._connection, None
        if connection is not None:
            await connection.kill()

    async def _living_connection(self) -> _Connection:
        async with self._starting:
            if self._is_shut_down:
                raise self._refusal("is shut down")
            if self._connection is None or self._connection.is_over:
                self._connection = _Connection(await self._start_process())
                self._connection.write(self._configuration)
            return self._connection

    async def _start_process(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_LINE_BYTES,
                env={**without_secrets(os.environ), **self._variables},
                start_new_session=True,  # a group of its own, to be ended with its children
            )
        except OSError as error:
            raise self._refusal("cannot be started") from error

    def _refusal(self, what: str) -> ServerOverloadedError:
        return ServerOverloadedError(f"the process that {self._purpose} {what}", reason=self._reason)


class _Connection:
    """One process, and the jobs that wait for its answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.is_over = False
        self._pending: dict[int, asyncio.Future[Outcome | None]] = {}
        self._num_jobs = 0
        self._reading = asyncio.create_task(self._read())

    async def run(self, job: dict[str, Any]) -> Outcome | None:
        """The outcome of a job; None where the process has ended before."""
        if self.is_over:
            return None
        self._num_jobs += 1
        pending: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self._pending[self._num_jobs] = pending
        self.write(json.dumps({"id": self._num_jobs, **job}))
        return await pending

    def write(self, line: str) -> None:
        """Sends a line without waiting; lines of waiting jobs are bounded by the queue."""
        if self.process.stdin is not None:
            self.process.stdin.write(line.encode() + b"\n")

    async def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        await self._reading

    async def _read(self) -> None:
        """Hands the answers to those that wait, until the process ends."""
        stdout = self.process.stdout
        while stdout is not None and (line := await stdout.readline()).endswith(b"\n"):
            report = json.loads(line)
            pending = self._pending.pop(report.pop("id"))
            if not pending.done():
                pending.set_result(Outcome(**report))
        self.is_over = True
        for pending in self._pending.values():
            if not pending.done():
                pending.set_result(None)
        await self.process.wait()
