"""Processes that wait for their start order.

One may be started before its configuration is known: it imports the model runner meanwhile, which is most of a start.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llmstack_engine_core.openmp import SHORT_SPINS
from llmstack_engine_core.progress import SharedProgress, make_progress_file
from llmstack_types import EngineStartError
from llmstack_types.child_environment import without_secrets


@dataclass(frozen=True, slots=True)
class WaitingProcess:
    """A process that waits for its start order.

    Attributes:
        lifeline: Our end of the socket by which each notices the end of the other.
        progress: Shared with the process.
    """

    popen: subprocess.Popen[bytes]
    lifeline: socket.socket
    progress: SharedProgress

    def end(self) -> None:
        """Ends it without asking: it has nothing to lose."""
        self.popen.kill()
        self.popen.wait()
        self.lifeline.close()


class _EarlyProcess:
    """The one process that was started early, for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: WaitingProcess | None = None

    def put(self, process: WaitingProcess) -> None:
        with self._lock:
            self._process = process

    def take(self) -> WaitingProcess | None:
        with self._lock:
            process, self._process = self._process, None
        return process


_early = _EarlyProcess()


@contextmanager
def early_process(runner: str | None) -> Iterator[None]:
    """Starts a process for the first engine core that is launched within the block; it imports `runner` meanwhile.

    It ends with the block if no engine core was launched. Where it cannot be started, the launch will say why. Without
    a runner none is started.
    """
    if runner is None:
        yield
        return
    try:
        _early.put(_start(runner))
    except EngineStartError:
        yield
        return
    try:
        yield
    finally:
        unused = _early.take()
        if unused is not None:
            unused.end()


def start_waiting_process() -> WaitingProcess:
    """The process that was started early, or another one.

    Raises:
        EngineStartError: There can be no further process.
    """
    early = _early.take()
    if early is not None:
        if early.popen.poll() is None:
            return early
        early.end()
    return _start()


def _start(*runner: str) -> WaitingProcess:
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            progress_fd = make_progress_file()
            try:
                fds = [theirs.fileno(), progress_fd]
                return WaitingProcess(_start_engine_core(fds, runner), ours, SharedProgress(progress_fd))
            finally:
                os.close(progress_fd)
    except OSError as error:
        ours.close()
        raise EngineStartError(f"the engine core's process cannot be started: {error.strerror}") from error


def _start_engine_core(fds: Sequence[int], runner: Sequence[str]) -> subprocess.Popen[bytes]:
    return start_module("llmstack_engine_core.process", fds, SHORT_SPINS, has_secrets=False, arguments=runner)


def start_module(
    module: str,
    fds: Sequence[int],
    environment: Mapping[str, str] | None = None,
    *,
    has_secrets: bool = True,
    arguments: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Runs `python -m module FD... ARGUMENT...` in a session of its own.

    Ctrl-C is for this process, which then ends that one. It inherits the descriptors, imports from where this process
    does, and gets what `environment` adds.

    `has_secrets`: Whether it inherits API keys and tokens.

    Raises:
        OSError: There can be no further process.
    """
    # -P keeps the current directory off the path; what this process imports from is handed over instead.
    python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    inherited = os.environ if has_secrets else without_secrets(os.environ)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, fds), *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        start_new_session=True,
        env={**(environment or {}), **inherited, "PYTHONPATH": python_path},
    )
