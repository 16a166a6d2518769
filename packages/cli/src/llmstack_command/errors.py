"""Errors that end the command with one line on standard error."""

from __future__ import annotations


class CommandLineError(Exception):
    """The command line cannot be run as it stands.

    Attributes:
        exit_code: 2 for a wrong command line, 1 where something is missing on the machine.
        prog: The command at fault, such as `llmstack serve`.
    """

    def __init__(self, message: str, *, prog: str = "llmstack", exit_code: int = 2) -> None:
        super().__init__(message)
        self.prog = prog
        self.exit_code = exit_code
