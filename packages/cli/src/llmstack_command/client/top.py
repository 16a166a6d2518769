"""`llmstack top`: the requests of a running server, in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from queue import Empty, Queue
from typing import Any, TextIO

from llmstack_command.client.api import ApiClient
from llmstack_command.client.board import MAX_REQUESTS, Board
from llmstack_command.client.run import connect
from llmstack_command.client.top_table import Style, top_lines
from llmstack_command.errors import ApiError

RETRY_S = 2.0
POLL_S = 0.1
# The other screen of a terminal keeps what was there before.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_MAX_PARTS = 8


def run_top(namespace: argparse.Namespace, stdout: TextIO | None = None) -> None:
    """Draws until `q` or Ctrl-C; without a terminal it prints one line per change.

    Raises:
        ApiError: The server cannot be reached or refuses; without a terminal, also that it has ended.
    """
    stdout = sys.stdout if stdout is None else stdout
    client, route = connect(namespace), "/live/events"
    if namespace.engine is not None:
        route += f"?engine={namespace.engine}"
    style = style_of(stdout, os.environ)
    with contextlib.suppress(KeyboardInterrupt):
        if not namespace.once and stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            _Screen(client, route, stdout, style).run()
        else:
            _print(client, route, stdout, style, is_once=namespace.once)


def style_of(stdout: TextIO, variables: dict[str, str] | os._Environ[str]) -> Style:
    """The style that a stream can show: colours on a terminal without NO_COLOR, characters of its encoding."""
    is_terminal = stdout.isatty() and variables.get("TERM", "dumb") != "dumb"
    encoding = (getattr(stdout, "encoding", None) or "utf-8").lower()
    return Style(is_terminal and not variables.get("NO_COLOR"), encoding.replace("-", "") == "utf8")


def _print(client: ApiClient, route: str, stdout: TextIO, style: Style, *, is_once: bool) -> None:
    boards: dict[int, Board] = {}
    said: list[str] = []
    with contextlib.closing(client.watch(route)) as parts:
        for part in parts:
            index = _take(boards, part)
            if is_once:
                if len(boards) < _num_engines(part, route):
                    continue
                lines = top_lines(
                    boards, shutil.get_terminal_size().columns if stdout.isatty() else 200, MAX_REQUESTS, style
                )
                _write(stdout, "\n".join(line.rstrip() for line in lines) + "\n")
                return
            board = boards[index]
            title = f"engine core {index}: " if _num_engines(part, route) > 1 else ""
            notes = [title + note for note in board.notes]
            lines = [title + board.summary(), *(note for note in notes if note not in said)]
            said = [note for note in said if not note.startswith(title)] + notes
            _write(stdout, "".join(f"{line}\n" for line in lines))


def _take(boards: dict[int, Board], part: dict[str, Any]) -> int:
    index = part.get("engine", 0)
    if not isinstance(index, int):
        raise ApiError("the stream has another form: is this a server of another version?")
    boards.setdefault(index, Board()).add(part)
    return index


def _num_engines(part: dict[str, Any], route: str) -> int:
    return 1 if "?" in route else int(part.get("num_engines", 1))


def _write(stdout: TextIO, text: str) -> None:
    """Writes at once; a character that the terminal's encoding lacks becomes a question mark."""
    encoding = getattr(stdout, "encoding", None) or "utf-8"
    stdout.write(text.encode(encoding, "replace").decode(encoding))
    stdout.flush()


class _Screen:
    """A terminal that is drawn again with every part, and where a key or Ctrl-C ends the command."""

    def __init__(self, client: ApiClient, route: str, stdout: TextIO, style: Style) -> None:
        self._client, self._route, self._stdout, self._style = client, route, stdout, style
        self._boards: dict[int, Board] = {}
        self._news: Queue[dict[str, Any] | ApiError] = Queue(_MAX_PARTS)
        self._problem = ""

    def run(self) -> None:
        """Draws until `q`.

        Raises:
            ApiError: The first connection failed. Later it is tried again.
        """
        threading.Thread(target=self._read, daemon=True).start()
        self._accept(self._news.get())  # before the screen is taken, so that an error stays in sight
        with _keys() as pressed, self._other_screen():
            size = (0, 0)
            while pressed() not in ("q", "Q"):
                has_news = self._accept_waiting()
                if has_news or size != shutil.get_terminal_size():
                    size = shutil.get_terminal_size()
                    self._draw(*size)

    def _read(self) -> None:
        while True:
            try:
                for part in self._client.watch(self._route):
                    self._news.put(part)
            except ApiError as error:
                self._news.put(error)
            time.sleep(RETRY_S)

    def _accept(self, news: dict[str, Any] | ApiError) -> None:
        if isinstance(news, dict):
            if self._problem:  # the steps that are kept come again
                self._problem, self._boards = "", {}
            _take(self._boards, news)
        elif self._boards:
            self._problem = f"connecting again (q ends): {news}"
        else:
            raise news

    def _accept_waiting(self) -> bool:
        has_news = False
        with contextlib.suppress(Empty):
            while True:
                self._accept(self._news.get_nowait())
                has_news = True
        return has_news

    def _draw(self, width: int, height: int) -> None:
        last = [self._style.shorten(self._problem, width)] if self._problem else []
        lines = top_lines(self._boards, width, height - len(last), self._style)
        text = f"{_END_OF_LINE}\r\n".join(last + lines)
        _write(self._stdout, f"{_HOME}{text}{_END_OF_LINE}{_BELOW}")

    @contextlib.contextmanager
    def _other_screen(self) -> Iterator[None]:
        try:
            _write(self._stdout, _ENTER)
            yield
        finally:
            _write(self._stdout, _LEAVE)


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits a moment for a key, and returns it or an empty text."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios  # not on Windows
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed() -> str:
        if not select.select([descriptor], [], [], POLL_S)[0]:
            return ""
        return os.read(descriptor, 1).decode("ascii", "replace") or "q"  # the terminal is gone

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key() -> str:
    time.sleep(POLL_S)
    return ""
