"""A process in reserve that has its model loaded, and replaces an engine core."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from llmstack_engine_client.processes.supervisor import EngineProcess
from llmstack_engine_client.processes.waiting_process import WaitingProcess
from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.priority import restore_priority
from llmstack_engine_core.progress import HangWatch
from llmstack_engine_core.start_order import LOADED, StartOrder, send_start_order
from llmstack_types import EngineStartError

logger = logging.getLogger(__name__)

# One that cannot be prepared, for want of memory say, would otherwise load for ever.
MAX_FAILURES: Final = 3


class Spares:
    """At most one engine core in reserve, and those after it; for any thread."""

    def __init__(self, config: EngineConfig, start: Callable[[], WaitingProcess]) -> None:
        """`start`: Starts a process that waits for its start order."""
        self._config = config
        self._start = start
        self._lock = threading.Lock()
        self._spare: _Spare | None = None
        self._num_failures = 0
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """Whether a process in reserve has loaded its model."""
        return self._spare is not None and self._spare.is_loaded

    @property
    def pid(self) -> int | None:
        """The process id of the spare."""
        return None if self._spare is None else self._spare.process.popen.pid

    def prepare(self) -> None:
        """Starts one if there is none; it loads with low priority. To be called again from time to time."""
        with self._lock:
            if self._spare is not None and not self._spare.is_alive:
                self._spare.end()
                self._spare = None
                self._note_failure("it has ended")
            if self._spare is not None or self._is_closed or self._num_failures >= MAX_FAILURES:
                return
            try:
                self._spare = _Spare(self._config, self._start())
            except (OSError, EngineStartError) as error:
                self._note_failure(str(error))

    def take(self, directory: Path, address: str) -> EngineProcess | None:
        """Lets the spare serve at an address; None if there is none. One that still loads serves when it has loaded."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is None:
            return None
        if not spare.is_alive:
            spare.end()
            self._note_failure("it has ended")
            return None
        self._num_failures = 0
        return spare.serve(directory, address)

    def close(self) -> None:
        """Ends the spare; there will be no other."""
        with self._lock:
            self._is_closed = True
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.end()

    def _note_failure(self, reason: str) -> None:
        self._num_failures += 1
        rest = "" if self._num_failures < MAX_FAILURES else "; the server goes on without one"
        logger.warning("no warm spare: %s%s", reason, rest)


class _Spare:
    def __init__(self, config: EngineConfig, process: WaitingProcess) -> None:
        self.process = process
        self._config = config
        self._is_loaded = False
        self._finalizer = weakref.finalize(self, _end, process, os.getpid())
        send_start_order(process.lifeline, StartOrder(config, Path(), os.getpid(), "", is_spare=True))

    @property
    def is_alive(self) -> bool:
        return self.process.popen.poll() is None

    @property
    def is_loaded(self) -> bool:
        if not self._is_loaded and self.is_alive:
            with contextlib.suppress(BlockingIOError):
                self._is_loaded = self.process.lifeline.recv(1, socket.MSG_DONTWAIT) == LOADED
        return self._is_loaded and self.is_alive

    def serve(self, directory: Path, address: str) -> EngineProcess:
        process, config = self.process, self._config
        self._finalizer.detach()
        restore_priority(process.popen.pid, os.getpriority(os.PRIO_PROCESS, 0))
        send_start_order(process.lifeline, StartOrder(config, directory, os.getpid(), address))
        watch = HangWatch(process.progress, config.hang_timeout_s)
        return EngineProcess(process.popen, process.lifeline, directory, config.shutdown_grace_s, address, watch)

    def end(self) -> None:
        self._finalizer()


def _end(process: WaitingProcess, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a fork of the owner exits, too
        process.end()
