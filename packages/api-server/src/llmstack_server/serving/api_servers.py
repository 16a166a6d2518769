"""A supervisor of several API processes on one socket, over the same engine cores."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmstack_engine_client.processes.waiting_process import start_module
from llmstack_engine_core.ipc.sockets import make_private_directory
from llmstack_server.options.config import ServeConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.serving import process_channel
from llmstack_server.serving.engine_processes import start_engine_processes
from llmstack_server.serving.event_loop import EarlySignals, handled_signals, in_daemon_thread, loop_factory, settle
from llmstack_server.serving.launcher import StageTimer
from llmstack_server.serving.ready_panel import ReadySummary, log_ready
from llmstack_server.serving.reload_supervisor import ReloadSupervisor
from llmstack_server.serving.sockets import address_of, listening

if TYPE_CHECKING:
    from llmstack_engine_client.processes.engines import EngineProcesses
    from llmstack_engine_client.processes.supervisor import EngineProcess

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
# Grace after the drain; processes that have not ended by then are killed.
STOP_GRACE_S = 10.0
# Time for the processes to log why an engine core has ended. During the start they may still be importing.
LAST_WORDS_S = 1.5
START_LAST_WORDS_S = 15.0


def run_multi_api_server(config: ServeConfig) -> int:
    """Serves until a signal (exit code 0) or the engine's death (1).

    Raises:
        ServeError: The server could not start.
    """
    timer, signals = StageTimer(), EarlySignals(stops_on_hangup=config.http.tls is None)
    with signals.installed(), contextlib.ExitStack() as stack:
        with timer.stage("bind socket"):
            listener = stack.enter_context(listening(config.http))
        directory = make_private_directory()
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        logger.info(
            "listening on %s with %d processes", address_of(config.http, listener), config.processes.num_api_servers
        )
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(ApiServers(config, timer, listener, directory).run(signals))


@dataclass(slots=True)
class _Worker:
    popen: subprocess.Popen[bytes]
    channel: socket.socket
    writer: asyncio.StreamWriter | None = None
    is_ready: bool = False
    is_serving: bool = False
    has_addresses: bool = False
    failure: str = ""

    def send(self, order: process_channel.Message) -> None:
        """Sends an order; it is dropped where the process has ended."""
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(process_channel.packed(order))


@dataclass(slots=True)
class ApiServers:
    """The API processes of one server.

    A process that ends unexpectedly is restarted, at most `MAX_RESTARTS` times a minute. Its requests are lost; those
    of other processes continue. The engine cores are shared: when one ends, the server stops.
    """

    config: ServeConfig
    timer: StageTimer
    listener: socket.socket
    directory: Path
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _restarts: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RESTARTS))
    _is_stopping: bool = False
    _has_served: bool = False
    _forced_by: int | None = None
    _start_event: process_channel.Message = field(default_factory=dict)
    _reloads: ReloadSupervisor = field(init=False)

    def __post_init__(self) -> None:
        self._reloads = ReloadSupervisor(self.config, lambda: self._workers)

    async def run(self, signals: EarlySignals) -> int:
        """Runs the processes until a signal or the end of an engine core; all have ended when it returns."""
        outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        opening = in_daemon_thread(lambda: start_engine_processes(self.config, self.timer), "start-engines")
        count = self.config.processes.num_api_servers
        tasks = [asyncio.create_task(self._keep(index, opening, outcome)) for index in range(count)]
        tasks.append(asyncio.create_task(self._watch_engines(opening, outcome)))
        for task in tasks:
            task.add_done_callback(lambda done: _fail_with(done, outcome))
        is_stopped = signals.is_stop_requested
        if is_stopped:
            settle(outcome, 0)
        # The loop delivers a signal from before it ran late, and must not count it as a second one.
        on_stop, on_hangup = partial(self._on_signal, outcome), partial(self._on_hangup, outcome)
        with contextlib.nullcontext() if is_stopped else handled_signals(on_stop, on_hangup):
            try:
                code = await outcome
            finally:
                await self._stop(tasks, opening)
        return code if self._forced_by is None else 128 + self._forced_by

    async def _keep(self, index: int, opening: asyncio.Future[EngineProcesses], outcome: asyncio.Future[int]) -> None:
        """Keeps one process running: starts it, and a replacement when it has ended."""
        try:
            while True:
                worker = self._start(index)
                await self._follow(index, worker, opening, outcome)
                self._reloads.lose(index)
                code = await asyncio.to_thread(worker.popen.wait)
                if self._is_stopping or not self._may_restart(index, worker, code, outcome):
                    return
        except (OSError, process_channel.ChannelError) as error:
            _fail(outcome, ServeError(f"an API process cannot be run: {error}"))

    def _start(self, index: int) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            popen = start_module("llmstack_server.serving.api_worker", [theirs.fileno(), self.listener.fileno()])
        order = {
            **shared_configuration(self.config), "index": index, "count": self.config.processes.num_api_servers,
            "directory": str(self.directory), "is_replacement": self._has_served,
        }  # fmt: skip
        with contextlib.suppress(BrokenPipeError):  # it has ended already; the caller finds out next
            process_channel.send(ours, order)
        self._workers[index] = _Worker(popen, ours)
        return self._workers[index]

    async def _follow(
        self,
        index: int,
        worker: _Worker,
        opening: asyncio.Future[EngineProcesses],
        outcome: asyncio.Future[int],
    ) -> None:
        """Sends the process the addresses of the engine cores, and handles its events until it ends."""
        reader, worker.writer = await asyncio.open_connection(sock=worker.channel)
        sending = asyncio.create_task(self._send_addresses(worker, opening))
        try:
            while (event := await process_channel.receive_from(reader)) is not None:
                if not self._reloads.note(index, event, partial(self._watch, outcome)):
                    self._note(worker, event)
        finally:
            worker.is_serving = False
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            worker.writer.close()

    def _note(self, worker: _Worker, event: process_channel.Message) -> None:
        if "failed" in event:
            worker.failure = str(event["failed"])
        elif event.get("ready"):
            worker.is_ready = True
            self._start_event = event
            self._let_serve(worker)
        elif event.get("serving"):
            worker.is_serving = True
            self._note_serving()
        elif "refuse" in event and self._reloads.engines is not None and self._reloads.engines.members is not None:
            self._reloads.engines.members.refuse(event)

    def _let_serve(self, worker: _Worker) -> None:
        """Lets the processes accept requests once all can; a replacement does at once."""
        if self._has_served:
            worker.send({"serve": True})
        elif all(one.is_ready for one in self._workers.values()):
            for one in self._workers.values():
                one.send({"serve": True})

    def _note_serving(self) -> None:
        """Lets the processes report Ready once all accept requests: after it no client meets one that does not."""
        if self._has_served or not all(worker.is_serving for worker in self._workers.values()):
            return
        self._has_served = True
        for worker in self._workers.values():
            worker.send({"all_serve": True})
        stages = {**self.timer.stage_to_s, **self._start_event["stages"]}
        summary = ReadySummary(*self._start_event["summary"])
        summary = summary._replace(text=f"{summary.text}, {len(self._workers)} API processes")
        address = address_of(self.config.http, self.listener)
        log_ready(address, self.timer.total_s, summary, stages, self.config.http)

    def _may_restart(self, index: int, worker: _Worker, code: int, outcome: asyncio.Future[int]) -> bool:
        if worker.failure:
            _fail(outcome, ServeError(worker.failure))
            return False
        if code == 1:  # its engine core has ended, and it has logged that
            settle(outcome, 1)
            return False
        now_s = time.monotonic()
        if len(self._restarts) == MAX_RESTARTS and now_s - self._restarts[0] < RESTART_WINDOW_S:
            logger.error("API process %d has ended (%s) too often: the server stops", index, _described(code))
            settle(outcome, 1)
            return False
        self._restarts.append(now_s)
        logger.error(
            "API process %d has ended (%s): its requests are lost, a replacement starts", index, _described(code)
        )
        return True

    async def _watch_engines(self, opening: asyncio.Future[EngineProcesses], outcome: asyncio.Future[int]) -> None:
        try:
            engines = await asyncio.shield(opening)
        except ServeError as error:
            _fail(outcome, error)
            return

        self._reloads.begin(engines)
        self._watch(outcome, engines)
        if engines.members is not None:
            engines.members.serve(self._tell_all)

    def _tell_all(self, order: process_channel.Message) -> None:
        """Sends what has changed to the processes that know what was before."""
        for worker in self._workers.values():
            if worker.has_addresses:
                worker.send(order)

    def _tell_end(self, engines: EngineProcesses, index: int, line: str) -> None:
        if engines is self._reloads.engines:
            self._tell_all({"ended": index, "reason": line})

    def _tell_loss(self, process: EngineProcess) -> None:
        """Lets the processes know which of their requests may be the cause: none of a signal from outside."""
        self._tell_all(
            {"lost": process.pid, "how": process.describe_end(), "is_outside": process.was_ended_from_outside}
        )

    def _watch(self, outcome: asyncio.Future[int], engines: EngineProcesses) -> None:
        """Replaces engine cores that end; where those that take new requests are gone, the server stops."""
        loop = asyncio.get_running_loop()

        def on_death(line: str, was_killed: bool) -> None:
            if not self._reloads.is_current(engines):
                self._reloads.note_death(engines, line)
            elif self._has_served:
                logger.error("%s", line)
                loop.call_later(LAST_WORDS_S, settle, outcome, 1)
            else:
                loop.call_later(0.0 if was_killed else START_LAST_WORDS_S, _fail, outcome, ServeError(line))

        engines.on_end, engines.on_loss = partial(self._tell_end, engines), self._tell_loss
        engines.watch(on_death)

    async def _send_addresses(self, worker: _Worker, opening: asyncio.Future[EngineProcesses]) -> None:
        with contextlib.suppress(ServeError):  # reported by `_watch_engines`
            engines = await asyncio.shield(opening)
            worker.send(self._reloads.addresses_order(engines))
            worker.has_addresses = True
            if engines.members is not None:
                worker.send(engines.members.state)

    async def _stop(self, tasks: list[asyncio.Task[None]], opening: asyncio.Future[EngineProcesses]) -> None:
        """Lets the processes drain, then stops the engine cores; kills what does not end in time."""
        self._is_stopping = True
        self._reloads.begin_stop()
        self.listener.close()  # each process has its own descriptor
        self._signal_workers(signal.SIGTERM)
        _, unfinished = await asyncio.wait(tasks, timeout=self.config.http.shutdown_timeout_s + STOP_GRACE_S)
        if unfinished:
            logger.warning("%d API processes did not end in time and are killed", len(unfinished))
            self._signal_workers(signal.SIGKILL)
            await asyncio.wait(unfinished)
        await self._reloads.stop()
        if not opening.cancel() and opening.exception() is None:
            await (self._reloads.engines or opening.result()).stop()

    def _signal_workers(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            worker.popen.send_signal(number)  # has no effect on a process that was waited for

    def _on_hangup(self, outcome: asyncio.Future[int]) -> None:
        """Lets the processes read their certificates again, where there are any; otherwise drains once."""
        if self.config.http.tls is not None:
            self._signal_workers(signal.SIGHUP)
        elif not outcome.done():
            self._on_signal(outcome, signal.SIGHUP)

    def _on_signal(self, outcome: asyncio.Future[int], number: int) -> None:
        if not outcome.done():
            logger.info("%s: shutting down", signal.Signals(number).name)
            outcome.set_result(0)
            return
        logger.warning("%s again: aborting everything", signal.Signals(number).name)
        self._forced_by = number
        # Another number than the first: Linux merges two pending signals of one number, and a busy process that saw
        # only one would drain.
        self._signal_workers(signal.SIGINT)


def shared_configuration(config: ServeConfig) -> process_channel.Message:
    """The configuration for another process as plain data, secrets included."""
    return {
        "settings": config.settings.to_plain(),
        "deployment_secret": config.deployment_secret.hex(),
        "operator_keys": [key.digest for key in config.http.operator_keys],
    }


def _fail(outcome: asyncio.Future[int], error: ServeError) -> None:
    if not outcome.done():
        outcome.set_exception(error)


def _fail_with(task: asyncio.Task[None], outcome: asyncio.Future[int]) -> None:
    """Ends the server with the exception of `task`: after a bug it must not wait forever."""
    if not task.cancelled() and (error := task.exception()) is not None and not outcome.done():
        outcome.set_exception(error)


def _described(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
