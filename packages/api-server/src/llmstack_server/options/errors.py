"""Errors of the server's start, each one readable line."""

from __future__ import annotations


class ServeError(Exception):
    """The server cannot start, or had to stop; the text says why in one line.

    Attributes:
        exit_code: 2 for a wrong command line, 1 for everything else.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
