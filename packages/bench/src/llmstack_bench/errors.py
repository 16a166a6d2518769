"""The error that ends a benchmark with a one-line message."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot run as configured; the text names the flag, the file or the server.

    Attributes:
        exit_code: 2 for a wrong command line, 1 if something outside it is missing or fails.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
