"""The output file of a batch, which a later run continues."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.apis.batches.lines import BatchFault, BatchRequest, digest_of

Value = TypeVar("Value")


@dataclass(slots=True)
class Answered:
    """Lines of earlier runs: answers by digests of their custom ids, faults by their line numbers."""

    custom_ids: set[bytes] = field(default_factory=set)
    fault_lines: set[int] = field(default_factory=set)

    def add(self, line: Any) -> None:
        """Adds one decoded line of the output; raises LookupError or TypeError for anything else."""
        error = line["error"]
        if line["response"] is None:
            self.fault_lines.add(int(error["line"]))
        else:
            self.custom_ids.add(digest_of(str(line["custom_id"])))

    def covers(self, item: BatchRequest | BatchFault) -> bool:
        """Whether a line of the input has its answer already."""
        if isinstance(item, BatchFault):
            return item.line in self.fault_lines
        return digest_of(item.custom_id) in self.custom_ids


class BatchOutput:
    """Appends whole lines to a file that one run at a time may open; removes an incomplete last line."""

    def __init__(self, file: BinaryIO, answered: Answered) -> None:
        self._file = file
        self.answered = answered

    @classmethod
    def open(cls, path: str) -> BatchOutput:
        """Opens `path`, `-` for standard output, and reads the lines of earlier runs.

        Raises:
            BatchError: The file cannot be written, another run writes it, or it has other lines.
        """
        return run_all(cls.open_in_steps(path))

    @classmethod
    def open_in_steps(cls, path: str) -> Generator[None, None, BatchOutput]:
        """Opens the file in steps of one line each."""
        if path == "-":
            return cls(sys.stdout.buffer, Answered())
        try:
            file = open(path, "a+b")  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise BatchError(f"--output-file: {path}: {error.strerror}", exit_code=2) from None
        try:
            _lock(file, path)
            answered = yield from _read_answered(file, path)
            return cls(file, answered)
        except BaseException:
            file.close()
            raise

    def append(self, line: bytes) -> None:
        """Writes one line and flushes it.

        Raises:
            BatchError: The line cannot be written.
        """
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise BatchError(f"the output cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Closes the file and releases its lock."""
        if self._file is not sys.stdout.buffer:
            with suppress(OSError):  # on a full disk `append` has said so; the next run removes what is incomplete
                self._file.close()


def run_all(steps: Generator[None, None, Value]) -> Value:
    """The result of work in steps, done at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(Value, end.value)


def check_paths(input_path: str, output_path: str) -> None:
    """Refuses an output file that is the input file.

    Raises:
        BatchError: Both paths are the same file.
    """
    paths = [Path(path) for path in (input_path, output_path) if path != "-"]
    if len(paths) == 2 and all(path.exists() for path in paths) and paths[0].samefile(paths[1]):
        raise BatchError("--output-file: the input is not overwritten; name another file", exit_code=2)


def _lock(file: BinaryIO, path: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BatchError(f"--output-file: another run is writing {path}") from None
    except OSError:
        pass  # a file system without locks, or a device such as /dev/stdout


def _read_answered(file: BinaryIO, path: str) -> Generator[None, None, Answered]:
    """Reads all lines, and leaves the file at its end after an incomplete last line was removed."""
    answered = Answered()
    if not file.seekable():
        return answered
    file.seek(0)
    start = 0
    for number, line in enumerate(file, 1):
        try:
            answered.add(json.loads(line))
        except (ValueError, LookupError, TypeError):
            if line.endswith(b"\n"):
                raise BatchError(
                    f"--output-file: line {number} of {path} is not an answer of a batch; name another file"
                ) from None
            os.truncate(file.fileno(), start)
            break
        start += len(line)
        yield
        if not line.endswith(b"\n"):
            file.write(b"\n")
    file.seek(0, os.SEEK_END)
    return answered
