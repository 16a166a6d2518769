"""Server of jobs: a process that forks children to do them.

`serve_children` is the main function of such a process. It reads lines of JSON from its standard input: first the
configuration, then one job each. It writes a line for each job, in the order in which they end.

Jobs run in processes that can be killed, because nothing else ends work in native code. Children are forked once
everything is read and imported, so that replacing one costs milliseconds. There are no threads here that a fork could
lose.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

Work = Callable[[dict[str, Any]], dict[str, Any]]
"""Does a job; both are plain data."""

WALL_FACTOR = 6
"""Seconds that may pass for one second of processor time; then the machine is overloaded, not the job slow."""
SLOW_NICENESS = 5
MAX_JOBS_PER_CHILD = 128
"""A child is replaced after these, so that what a job leaves behind stays bounded."""
_PIECE_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class _Child:
    """A child process, with the job that it works on.

    Attributes:
        line: The line of the job, without its end.
        is_line_lost: Whether the child ended before it had read that line.
        processor_s: The processor time of its earlier jobs, in seconds.
    """

    pid: int
    link: socket.socket
    is_slow: bool
    job_id: int = 0
    line: bytes = b""
    is_line_lost: bool = False
    num_jobs: int = 0
    processor_s: float = 0.0
    answer: bytes = b""


class ChildServer:
    """Gives each line to a child, and writes what became of it. The client bounds how many there are at once."""

    def __init__(self, work: Work, write: Callable[[bytes], object]) -> None:
        self._work = work
        self._write = write
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._idle: dict[bool, list[_Child]] = {False: [], True: []}

    def serve(self, source: int, begun: bytes) -> None:
        """Works on the lines of a file descriptor until it ends. `begun`: The bytes that were read of it already."""
        self._selector.register(source, selectors.EVENT_READ)
        begun = self._start_lines(begun)
        while True:
            for key, _ in self._selector.select():
                if key.fd != source:
                    self._read_child(self._children[key.fd])
                elif piece := os.read(source, _PIECE_BYTES):
                    begun = self._start_lines(begun + piece)
                else:
                    self._end_children()
                    return

    def _start_lines(self, text: bytes) -> bytes:
        """Starts the job of each whole line; returns the rest."""
        *lines, rest = text.split(b"\n")
        for line in lines:
            self._start(line)
        return rest

    def _start(self, line: bytes) -> None:
        job = json.loads(line)
        is_slow = bool(job["is_slow"])
        child = self._idle[is_slow].pop() if self._idle[is_slow] else self._fork(is_slow)
        child.job_id, child.line = job["id"], line
        child.num_jobs += 1
        try:
            child.link.sendall(line + b"\n")
        except OSError:  # it has ended, which is read next
            child.is_line_lost = True

    def _fork(self, is_slow: bool) -> _Child:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _work_and_exit(self._work, theirs, [ours, *(child.link for child in self._children.values())], is_slow)
        theirs.close()
        child = self._children[ours.fileno()] = _Child(pid, ours, is_slow)
        self._selector.register(ours.fileno(), selectors.EVENT_READ)
        return child

    def _read_child(self, child: _Child) -> None:
        try:
            if piece := child.link.recv(_PIECE_BYTES):
                child.answer += piece
                if piece.endswith(b"\n"):
                    self._take_answer(child)
                return
        except ConnectionResetError:  # it left bytes unread
            child.is_line_lost = True
        self._bury(child)

    def _take_answer(self, child: _Child) -> None:
        report, child.answer = json.loads(child.answer), b""
        child.processor_s += report["processor_s"]
        self._report(child.job_id, report["answer"], 0, report["processor_s"])
        child.job_id = 0
        if child.num_jobs < MAX_JOBS_PER_CHILD:
            self._idle[child.is_slow].append(child)
        else:
            child.link.shutdown(socket.SHUT_WR)  # it ends then

    def _bury(self, child: _Child) -> None:
        """Reports the job of a child that has ended over it. One that had ended before is replaced."""
        self._selector.unregister(child.link.fileno())
        del self._children[child.link.fileno()]
        child.link.close()
        if child in self._idle[child.is_slow]:
            self._idle[child.is_slow].remove(child)
        _, status, usage = os.wait4(child.pid, 0)
        if child.is_line_lost and child.num_jobs > 1:  # killed while it was idle: its job is not to blame
            self._start(child.line)
        elif child.job_id:
            processor_s = max(0.0, usage.ru_utime + usage.ru_stime - child.processor_s)
            self._report(child.job_id, None, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, processor_s)

    def _report(self, job_id: int, answer: dict[str, Any] | None, ended_by: int, processor_s: float) -> None:
        report = {
            "id": job_id, "answer": answer, "is_late": ended_by == signal.SIGPROF,
            "is_starved": ended_by == signal.SIGALRM, "processor_s": processor_s,
        }  # fmt: skip
        self._write(json.dumps(report).encode() + b"\n")

    def _end_children(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


def _work_and_exit(work: Work, link: socket.socket, foreign: list[socket.socket], is_slow: bool) -> NoReturn:
    """The life of a child: it answers lines until its parent closes the link."""
    status = 1
    try:
        # The client must see the end of its parent's output, and siblings the end of their links.
        for fd in (0, 1, *(one.fileno() for one in foreign)):
            os.close(fd)
        if is_slow:
            os.nice(SLOW_NICENESS)
        with link.makefile("rb") as lines:
            for line in lines:
                link.sendall(json.dumps(_timed(work, json.loads(line))).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)


def _timed(work: Work, line: dict[str, Any]) -> dict[str, Any]:
    """One job. The kernel keeps its time, and its signals end native code too."""
    began_s = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, line["limit_s"])
    signal.setitimer(signal.ITIMER_REAL, line["limit_s"] * WALL_FACTOR)
    answer = work(line["job"])
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {"answer": answer, "processor_s": time.process_time() - began_s}


def serve_children(prepare: Callable[[dict[str, Any]], Work], *, max_memory_bytes: int) -> None:
    """Works on the jobs of standard input to its end. The main function of a process.

    Args:
        prepare: Makes the work of the configuration, before any child is forked.
        max_memory_bytes: Address space of this process, and of each child.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a child that crashes leaves no content of users on the disk
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent closes our input
    text = b""
    while b"\n" not in text:
        piece = os.read(0, _PIECE_BYTES)
        if not piece:
            return
        text += piece
    configuration, _, begun = text.partition(b"\n")
    server = ChildServer(prepare(json.loads(configuration)), _write_all)
    with contextlib.suppress(BrokenPipeError):  # the client is gone
        server.serve(0, begun)


def _write_all(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
