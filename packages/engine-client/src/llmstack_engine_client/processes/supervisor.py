"""Supervision of one engine core's process, to its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import weakref
from pathlib import Path

from llmstack_engine_core.ipc.sockets import remove_places
from llmstack_engine_core.progress import STACKS_SIGNAL, HangWatch


class EngineProcess:
    """A started engine core process. Its owner ends it, at the latest when the object is collected or at exit.

    Attributes:
        directory: Its private directory.
        address: Where it listens.
        death_fd: Becomes readable when the process has ended; to be watched, not to be read.
    """

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        lifeline: socket.socket,
        directory: Path,
        grace_s: float,
        address: str,
        watch: HangWatch | None = None,
    ) -> None:
        """`watch`: The watch that notices a process that hangs; None lets it hang."""
        self.directory = directory
        self.address = address
        self._popen = popen
        self._grace_s = grace_s
        self._watch = watch
        self._hang_s = 0.0
        self._pidfd = _open_pidfd(popen.pid)
        self.death_fd = lifeline.fileno() if self._pidfd is None else self._pidfd
        self._finalizer = weakref.finalize(
            self, _end, popen, lifeline, (directory, address), grace_s, self._pidfd, os.getpid()
        )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        """False once the process has ended."""
        return self._popen.poll() is None

    @property
    def has_been_ready(self) -> bool:
        """True once it had its model loaded."""
        return self._watch is not None and self._watch.has_begun

    @property
    def was_killed(self) -> bool:
        """True if a signal has ended the process: it could not say why."""
        status = self._popen.poll()
        return status is not None and status < 0

    @property
    def was_ended_from_outside(self) -> bool:
        """True if it was asked to end, or killed by an operator or a memory limit: by no fault of its own.

        A process that `look` has ended had hung.
        """
        return not self._hang_s and self._popen.poll() in (0, -signal.SIGTERM, -signal.SIGKILL)

    @property
    def grace_s(self) -> float:
        """The time that `stop` waits before it kills."""
        return self._grace_s

    def describe_end(self) -> str:
        """The end of the process in words, for a message."""
        status = self._popen.poll()
        if status is None:
            return "still running"
        if self._hang_s:
            return f"killed, since it had made no progress for {self._hang_s:.0f} s"
        return f"killed by {_signal_name(-status)}" if status < 0 else f"exit status {status}"

    def look(self) -> None:
        """Ends the process if it hangs; to be called every `look_interval_s`.

        The first signal lets it write the stacks of its threads, the second one, a look later, cannot be refused.
        """
        if self._watch is None or not self.is_alive:
            return
        if self._hang_s:
            self._signal(signal.SIGKILL)
            return
        self._hang_s = self._watch.look(time.monotonic())
        if self._hang_s:
            self._signal(STACKS_SIGNAL)

    def _signal(self, number: signal.Signals) -> None:
        """Sends a signal through the descriptor, so that it never reaches another process with this id."""
        if self._pidfd is None:
            self._popen.send_signal(number)
        else:
            signal.pidfd_send_signal(self._pidfd, number)

    @property
    def look_interval_s(self) -> float:
        """The interval between calls of `look`; 0 for none."""
        return 0.0 if self._watch is None else self._watch.interval_s

    def terminate(self) -> None:
        """Asks the process to end; returns at once."""
        self._popen.terminate()

    def kill(self) -> None:
        """Ends the process without asking."""
        self._popen.kill()

    def stop(self) -> None:
        """Ends the process, waits for it (the grace at most, then it is killed), removes its directory. Idempotent."""
        self._finalizer()


def _open_pidfd(pid: int) -> int | None:
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None


def _end(
    popen: subprocess.Popen[bytes],
    lifeline: socket.socket,
    places: tuple[Path, str],
    grace_s: float,
    pidfd: int | None,
    owner_pid: int,
) -> None:
    if os.getpid() != owner_pid:  # a fork of the owner exits: the process is not its to end
        return
    popen.terminate()
    try:
        popen.wait(grace_s)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
    lifeline.close()
    if pidfd is not None:
        os.close(pidfd)
    remove_places(*places)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
