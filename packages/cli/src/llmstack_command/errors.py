"""Errors of the command, and the suggestion of the nearest word in their texts."""

from __future__ import annotations

from collections.abc import Iterable


class CommandLineError(Exception):
    """The command line is invalid, or something it needs is missing.

    The message is one line; `main` prints it after the name of the command and ends with the exit code.

    Attributes:
        exit_code: 2 for a wrong command line, 1 if something is missing on the machine.
        prog: The command at fault, such as `llmstack serve`.
    """

    def __init__(self, message: str, *, prog: str = "llmstack", exit_code: int = 2) -> None:
        super().__init__(message)
        self.prog = prog
        self.exit_code = exit_code


class ApiError(Exception):
    """The server cannot be reached, refuses, or sends an invalid answer; the text is for the user.

    Attributes:
        code: The server's own code of the error, such as `model_not_found`; None if it sent none.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the candidate nearest to `word`, or an empty text."""
    import difflib  # late: only a mistyped word needs it

    nearest = difflib.get_close_matches(word, list(candidates), n=1)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""
