"""Suspension of server processes that are not being measured.

A server that spins while idle would otherwise take a core from the measured one.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator

from llmstack_bench.errors import BenchError
from llmstack_bench.process_tree import tree_pids


class PausedTrees:
    """A context manager that suspends the process trees of `pids` (SIGSTOP), except inside `running`.

    Raises:
        BenchError: On entering, if a process does not exist or belongs to another user.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)

    def __enter__(self) -> PausedTrees:
        with contextlib.ExitStack() as undo:
            undo.callback(self._resume_all)
            for pid in self._pids:
                _signal_tree(pid, signal.SIGSTOP)
            undo.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._resume_all()

    @contextlib.contextmanager
    def running(self, pid: int) -> Iterator[None]:
        """Resumes one process tree until the block ends."""
        _signal_tree(pid, signal.SIGCONT)
        try:
            yield
        finally:
            with contextlib.suppress(BenchError):  # a server that has ended shows in its failed requests
                _signal_tree(pid, signal.SIGSTOP)

    def _resume_all(self) -> None:
        for pid in self._pids:
            # A process that has ended must not leave the others suspended.
            with contextlib.suppress(BenchError):
                _signal_tree(pid, signal.SIGCONT)


def _signal_tree(pid: int, number: signal.Signals) -> None:
    """Signals a process and its descendants, parents first: a suspended parent starts no more children."""
    members = tree_pids(pid)
    if not members:
        raise BenchError(f"--server-pid {pid}: there is no such process")
    for member in members:
        try:
            os.kill(member, number)
        except ProcessLookupError:
            continue  # ended since it was listed
        except PermissionError as error:
            raise BenchError(f"--server-pid {pid}: {member} belongs to another user") from error
