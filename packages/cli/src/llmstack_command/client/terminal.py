"""Standard input and output of a conversation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TextIO

from llmstack_command.errors import ApiError

MAX_INPUT_CHARS = 4 << 20
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# Model output must not move the cursor or fill the clipboard: control characters except tab and newline are replaced.
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}


class Terminal:
    """Standard input and output, interactive or piped."""

    def __init__(self, stdin: TextIO | None = None, stdout: TextIO | None = None) -> None:
        self._stdin = sys.stdin if stdin is None else stdin
        self._stdout = sys.stdout if stdout is None else stdout
        self.is_interactive = self._stdin.isatty()
        self._is_dim = False
        if self.is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (importing it gives `input` line editing and history)

    def messages(self) -> Iterator[str]:
        """The lines of the user until Ctrl-D; the whole content of a pipe is one message.

        Raises:
            ApiError: A pipe has more text than a request can have, or none.
        """
        if not self.is_interactive:
            yield self._piped()
            return
        while True:
            try:
                line = input("> " if self._stdout.isatty() else "")
            except EOFError:
                self._stdout.write("\n")
                return
            if line.strip():
                yield line

    def write(self, text: str, *, is_aside: bool = False) -> None:
        """Shows a part of an answer at once. An aside (reasoning) is dim, and omitted outside a terminal."""
        is_terminal = self._stdout.isatty()
        if is_aside and not is_terminal:
            return
        if is_terminal:
            text = text.translate(_CONTROL)
            if is_aside != self._is_dim:
                text = (_DIM if is_aside else _PLAIN + "\n\n") + text
                self._is_dim = is_aside
        self._stdout.write(text)
        self._stdout.flush()

    def end_answer(self) -> None:
        """Closes the line of an answer."""
        self._stdout.write((_PLAIN if self._is_dim else "") + "\n")
        self._stdout.flush()
        self._is_dim = False

    def _piped(self) -> str:
        try:
            text = self._stdin.read(MAX_INPUT_CHARS + 1)
        except UnicodeDecodeError:
            raise ApiError("standard input is not UTF-8 text") from None
        if len(text) > MAX_INPUT_CHARS:
            raise ApiError(f"standard input is longer than {MAX_INPUT_CHARS} characters")
        if not text.strip():
            raise ApiError("standard input is empty")
        return text
