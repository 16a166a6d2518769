"""Standard input and output of a conversation."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from llmstack_command.client.markdown import MarkdownStyle
from llmstack_command.errors import ApiError

MAX_INPUT_CHARS = 4 << 20
MAX_HISTORY_LINES = 1000
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_QUOTES = '"""'
# Model output must not move the cursor or fill the clipboard: control characters except tab and newline are replaced.
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}


def without_control_characters(text: str) -> str:
    """The text as a terminal may show it."""
    return text.translate(_CONTROL)


class Terminal:
    """Standard input and output, interactive or piped."""

    def __init__(self, stdin: TextIO | None = None, stdout: TextIO | None = None) -> None:
        self._stdin = sys.stdin if stdin is None else stdin
        self._stdout = sys.stdout if stdout is None else stdout
        self.is_interactive = self._stdin.isatty()
        self._is_dim = False
        self._has_color = self._stdout.isatty() and "NO_COLOR" not in os.environ
        self._style: MarkdownStyle | None = None

    def open_history(self, path: Path) -> None:
        """Gives `input` line editing, and a history that later sessions have too."""
        try:
            import readline
        except ImportError:  # some builds of Python have none
            return
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
        readline.set_history_length(MAX_HISTORY_LINES)

    def save_history(self, path: Path) -> None:
        """Writes the history where only its owner reads it; a folder that cannot be written is no error."""
        with contextlib.suppress(ImportError, OSError):
            import readline

            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            readline.write_history_file(path)

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
            message = self._whole(line)
            if message.strip():
                yield message

    def _whole(self, line: str) -> str:
        """A message of several lines: between triple quotes, or while lines end in a backslash."""
        lines = []
        if line.strip().startswith(_QUOTES):
            line = line.strip().removeprefix(_QUOTES)
            while not line.endswith(_QUOTES):
                lines.append(line)
                try:
                    line = self._next_line()
                except EOFError:
                    return "\n".join(lines)
            return "\n".join([*lines, line.removesuffix(_QUOTES)])
        while line.endswith("\\"):
            lines.append(line[:-1])
            try:
                line = self._next_line()
            except EOFError:
                line = ""
        return "\n".join([*lines, line])

    def _next_line(self) -> str:
        return input("… " if self._stdout.isatty() else "")

    def write(self, text: str, *, is_aside: bool = False) -> None:
        """Shows a part of an answer at once. An aside (reasoning) is dim, and omitted outside a terminal."""
        is_terminal = self._stdout.isatty()
        if is_aside and not is_terminal:
            return
        if is_terminal:
            text = without_control_characters(text)
            if is_aside != self._is_dim:
                self._stdout.write(_DIM if is_aside else _PLAIN + "\n\n")
                self._is_dim = is_aside
        if self._has_color and not is_aside:
            self._style = self._style or MarkdownStyle()
            text = self._style.add(text)
        self._stdout.write(text)
        self._stdout.flush()

    def end_answer(self) -> None:
        """Closes the line of an answer."""
        style, self._style = self._style, None
        self._stdout.write(("" if style is None else style.end()) + (_PLAIN if self._is_dim else "") + "\n")
        self._stdout.flush()
        self._is_dim = False

    def note(self, text: str) -> None:
        """Shows lines that are no part of an answer."""
        shown = without_control_characters(text)
        self._stdout.write(f"{_DIM}{shown}{_PLAIN}\n" if self._has_color else f"{shown}\n")
        self._stdout.flush()

    def show_error(self, text: str) -> None:
        """Shows why a message has no answer."""
        print(f"error: {text}", file=sys.stderr)

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
