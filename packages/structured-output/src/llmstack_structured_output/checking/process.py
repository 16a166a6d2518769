"""Process that checks whether constraints compile: one child process for each.

`python -m llmstack_structured_output.checking.process` starts it. It reads lines of JSON: first the configuration of
the compiler, then one job each. It writes a line for each job, in the order in which they end.

A process for each constraint, because nothing else ends the work of a compiler: it is native code in a thread, and its
fuel does not pay for everything (a hundred patterns that must all match keep it busy for nine minutes). Children are
forked once the tokenizer is read, so that ending one costs nothing. There are no threads here that a fork could lose.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from llmstack_structured_output.compiler import GrammarCompiler
from llmstack_types import InvalidRequestError, StructuredOutputsParams

MAX_MEMORY_BYTES = 4 << 30
WALL_FACTOR = 6
"""Seconds that may pass for one second of processor time; then the machine is overloaded, not the constraint slow."""
SLOW_NICENESS = 5
_PIECE_BYTES = 1 << 16


@dataclass(slots=True)
class _Child:
    pid: int
    job_id: int
    answer: bytes = b""


class CheckingServer:
    """Starts a child for each line, and writes what became of it. The client bounds how many there are at once."""

    def __init__(self, compiler: GrammarCompiler, write: Callable[[bytes], object]) -> None:
        self._compiler = compiler
        self._write = write
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}

    def serve(self, source: int, begun: bytes) -> None:
        """Works on the lines of a file descriptor until it ends. `begun`: What was read of it already."""
        self._selector.register(source, selectors.EVENT_READ)
        begun = self._start_lines(begun)
        while True:
            for key, _ in self._selector.select():
                if key.fd != source:
                    self._read_child(key.fd)
                elif piece := os.read(source, _PIECE_BYTES):
                    begun = self._start_lines(begun + piece)
                else:
                    self._end_children()
                    return

    def _start_lines(self, text: bytes) -> bytes:
        """Starts a child for each whole line; returns the rest."""
        *lines, rest = text.split(b"\n")
        for line in lines:
            self._start(json.loads(line))
        return rest

    def _start(self, job: dict[str, Any]) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _check_and_exit(self._compiler, job, writing)
        os.close(writing)
        self._children[reading] = _Child(pid, job["id"])
        self._selector.register(reading, selectors.EVENT_READ)

    def _read_child(self, fd: int) -> None:
        child = self._children[fd]
        if piece := os.read(fd, _PIECE_BYTES):
            child.answer += piece
            return
        self._selector.unregister(fd)
        os.close(fd)
        del self._children[fd]
        _, status, usage = os.wait4(child.pid, 0)
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        report = {
            "id": child.job_id,
            "answer": json.loads(child.answer) if child.answer and not status else None,
            "is_late": ended_by == signal.SIGPROF,
            "is_starved": ended_by == signal.SIGALRM,
            "processor_s": usage.ru_utime + usage.ru_stime,
        }
        self._write(json.dumps(report).encode() + b"\n")

    def _end_children(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


def _check_and_exit(compiler: GrammarCompiler, job: dict[str, Any], writing: int) -> NoReturn:
    """The life of a child. The kernel keeps its time, and its signals end native code too."""
    status = 1
    try:
        os.close(0)
        os.close(1)  # the client must see the end of this process's output although a child is alive
        if job["is_slow"]:
            os.nice(SLOW_NICENESS)
        signal.setitimer(signal.ITIMER_PROF, job["limit_s"])
        signal.setitimer(signal.ITIMER_REAL, job["limit_s"] * WALL_FACTOR)
        os.write(writing, json.dumps(_answer(compiler, job["params"])).encode())
        status = 0
    finally:
        os._exit(status)


def _answer(compiler: GrammarCompiler, fields: dict[str, Any]) -> dict[str, Any]:
    try:
        compiler.compile(StructuredOutputsParams(**fields))
    except InvalidRequestError as error:
        return {"message": error.message, "param": error.param, "code": error.code}
    return {}


def _compiler(configuration: dict[str, Any]) -> GrammarCompiler:
    compiler = GrammarCompiler(
        Path(configuration["tokenizer_folder"]), configuration["vocab_size"], configuration["eos_token_ids"]
    )
    with contextlib.suppress(InvalidRequestError):  # a bad tokenizer is an error of each constraint
        compiler.compile(StructuredOutputsParams(regex="a"))  # reads the tokenizer, whose time is no constraint's
    return compiler


def main() -> None:
    """Reads standard input to its end."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent closes our input
    text = b""
    while b"\n" not in text:
        piece = os.read(0, _PIECE_BYTES)
        if not piece:
            return
        text += piece
    configuration, _, begun = text.partition(b"\n")
    server = CheckingServer(_compiler(json.loads(configuration)), _write_all)
    with contextlib.suppress(BrokenPipeError):  # the client is gone
        server.serve(0, begun)


def _write_all(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
