"""What can go wrong between the terminal and a server, as one readable line."""

from __future__ import annotations


class ApiError(Exception):
    """The server is not there, refuses, or answers what no server of this API answers; the text is for the user.

    Attributes:
        code: The server's own code of the error, such as `model_not_found`; None where it has none.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code
