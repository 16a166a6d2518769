"""Stops the processes of the servers that are not being measured, so that one which spins while idle takes no core."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator

from llmstack_bench.errors import BenchError
from llmstack_bench.process_tree import tree_pids


class PausedTrees:
    """A context manager: the process trees of `pids` stand still (SIGSTOP) while it is open, except in their turns.

    Raises:
        BenchError: On entering, where one of the processes is not there, or is another user's.
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
    def turn(self, pid: int) -> Iterator[None]:
        """Lets this one run until the block ends."""
        _signal_tree(pid, signal.SIGCONT)
        try:
            yield
        finally:
            with contextlib.suppress(BenchError):  # where it ended, its failed requests say so
                _signal_tree(pid, signal.SIGSTOP)

    def _resume_all(self) -> None:
        for pid in self._pids:
            # One that ended meanwhile must not leave the others standing.
            with contextlib.suppress(BenchError):
                _signal_tree(pid, signal.SIGCONT)


def _signal_tree(pid: int, number: signal.Signals) -> None:
    """Signals a process and its descendants, parents first: a parent that stands still starts no further child."""
    members = tree_pids(pid)
    if not members:
        raise BenchError(f"--server-pid {pid}: there is no such process")
    for member in members:
        try:
            os.kill(member, number)
        except ProcessLookupError:
            continue  # ended since it was listed
        except PermissionError as error:
            raise BenchError(f"--server-pid {pid}: {member} is another user's process") from error
