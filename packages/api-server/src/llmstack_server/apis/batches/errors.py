"""The error that ends a batch before its last line."""

from __future__ import annotations


class BatchError(Exception):
    """The batch cannot run or continue; answers already written stay.

    Attributes:
        exit_code: 2 for an invalid command line, 1 for everything else.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class BatchLostError(Exception):
    """The batch is not in the table any more: the folder of the server was removed."""
