"""Writes docs/serve.svg and docs/chat.svg, the terminals of the front page: `python tools/record_terminal.py`.

Both come from one real run on terminals of their own. `llmstack serve` starts with the model that talks, which must be
installed (`tools/fetch_model.py smollm2`), and curl asks it. Then `llmstack chat` asks for more, and the engine core is
killed in the middle of an answer.
Output appears at the times of the run; pauses are cut to `MAX_PAUSE_S`. The pictures leave out most lines of the log
and show port 8000 in place of the free one that the run used.
"""

from __future__ import annotations

import fcntl
import html
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
COLUMNS, ROWS = 98, 40
CHAR_WIDTH, LINE_HEIGHT, MARGIN, BAR = 7.8, 19, 16, 30
MAX_PAUSE_S = 1.0
TYPING_S = 0.6  # how long a command is on the screen before its output
WAIT_S = 60.0
LOG_LINE = re.compile(r"(\d\d:\d\d:\d\d) (\w+) +(?:\(engine-core (\d+)\) )?[\w.]+: ")
SHOWN_LOG = re.compile(r"listening on|is ready on")
STAGE = re.compile(r"  [\w: ]+ \d+\.\d+ s$")
ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
COLOURS = {
    "prompt": "#7ee787", "command": "#e6edf3", "output": "#c9d1d9", "log": "#8b949e", "note": "#d2a8ff",
    "link": "#79c0ff", "warning": "#d29922",
}  # fmt: skip
STYLES = {"1": "command", "2": "log", "33": "warning", "36": "link"}
"""The style of each sequence of colours that the commands write; any other ends it."""


@dataclass
class Screen:
    """What appeared on the terminal: pieces of text, each with its row, column, style and time."""

    pieces: list[tuple[int, int, str, str, float]] = field(default_factory=list)
    row: int = 0
    column: int = 0
    clock_s: float = 0.0
    last_s: float = field(default_factory=time.monotonic)

    def tick(self) -> None:
        """Advances the picture's clock by the time since the last piece, without long pauses."""
        now = time.monotonic()
        self.clock_s += min(now - self.last_s, MAX_PAUSE_S)
        self.last_s = now

    def write(self, text: str, style: str) -> None:
        """Appends text at the cursor; long lines wrap."""
        self.tick()
        for index, line in enumerate(text.split("\n")):
            if index:
                self.row, self.column = self.row + 1, 0
            self._write_line(line, style)

    def write_raw(self, text: str, style: str = "output") -> None:
        """Appends what a command wrote, in its colours."""
        start = 0
        for escape in ESCAPE.finditer(text):
            self.write(text[start : escape.start()], style)
            start = escape.end()
            if escape[2] == "m":
                style = STYLES.get(escape[1], "output")
        self.write(text[start:], style)

    def _write_line(self, line: str, style: str) -> None:
        """Writes at the cursor; a line that does not fit breaks at a space where there is one."""
        is_continued = False
        while line:
            room = COLUMNS - self.column
            space = line.rfind(" ", 0, room + 1)
            if len(line) > room and space <= 0 < self.column and len(line) <= COLUMNS:
                end = 0
            else:
                end = len(line) if len(line) <= room else space + 1 if space > 0 else room
            text = line[:end].lstrip() if is_continued else line[:end]
            self.pieces.append((self.row, self.column, text, style, self.clock_s))
            self.column += len(text)
            line, is_continued = line[end:], True
            if line:
                self.row, self.column = self.row + 1, 0

    def line(self, text: str, style: str) -> None:
        """A line of its own, whatever stands on the current one."""
        self.write(("\n" if self.column else "") + text + "\n", style)

    def command(self, text: str) -> None:
        """A prompt and a command."""
        self.write(("\n" if self.column else "") + "$ ", "prompt")
        self.write(text + "\n", "command")
        self.clock_s += TYPING_S

    def svg(self, label: str) -> str:
        """The picture: an animation where styles are animated, the last state elsewhere."""
        width = COLUMNS * CHAR_WIDTH + 2 * MARGIN
        height = (max(piece[0] for piece in self.pieces) + 1) * LINE_HEIGHT + 2 * MARGIN + BAR
        texts = "\n".join(self._text(*piece) for piece in self.pieces if piece[2].strip())
        dots = "".join(f'<circle cx="{x}" cy="16" r="5" fill="#484f58"/>' for x in (20, 38, 56))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
            f'aria-label="{label}">\n<style>text{{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'
            f"monospace;white-space:pre;animation:show .01s both}}@keyframes show{{from{{opacity:0}}to{{opacity:1}}}}"
            f"@media (prefers-reduced-motion){{text{{animation:none}}}}</style>\n"
            f'<rect width="100%" height="100%" rx="8" fill="#0d1117" stroke="#30363d"/>{dots}\n{texts}\n</svg>\n'
        )

    def _text(self, row: int, column: int, text: str, style: str, at_s: float) -> str:
        x, y = MARGIN + column * CHAR_WIDTH, BAR + MARGIN + row * LINE_HEIGHT + 6
        stripped = text.rstrip()
        return (
            f'<text x="{x:.1f}" y="{y}" fill="{COLOURS[style]}" textLength="{len(stripped) * CHAR_WIDTH:.1f}" '
            f'xml:space="preserve" style="animation-delay:{at_s:.2f}s">{html.escape(stripped)}</text>'
        )


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *words: str, **variables: str) -> None:
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.environ.update(variables, TERM="xterm-256color")
            os.execv(sys.executable, [sys.executable, "-m", "llmstack_command", *words])  # noqa: S606 - no shell
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

    def read(self) -> Iterator[str]:
        """What it writes, in pieces, until it writes nothing for `WAIT_S` or ends."""
        while select.select([self._descriptor], [], [], WAIT_S)[0]:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:  # it has ended
                return
            yield data.decode(errors="replace").replace("\r", "")

    def type(self, text: str) -> None:
        """Types a line."""
        os.write(self._descriptor, text.encode() + b"\r")

    def end(self, by: int) -> None:
        """Ends the command by a signal."""
        os.kill(self.pid, by)
        for _ in self.read():
            pass
        os.waitpid(self.pid, 0)


class Run:
    """One server with the model that talks, and the commands against it."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.engine_pid = 0

    def record(self) -> dict[str, str]:
        """Plays all commands; the name of each picture to its content."""
        serve, chat = Screen(), Screen()
        serve.command("llmstack serve")
        server = Terminal("serve", LLMSTACK_PORT=str(self.port))
        try:
            self._watch_start(server, serve)
            self._complete(serve)
            self._chat(chat)
        finally:
            server.end(signal.SIGTERM)
        return {
            "serve.svg": serve.svg("A terminal: llmstack serve starts, and curl gets an answer"),
            "chat.svg": chat.svg("A terminal: llmstack chat, whose answer goes on after the engine was killed"),
        }

    def _watch_start(self, server: Terminal, screen: Screen) -> None:
        """Shows the lines of the start, up to the end of the panel with the addresses."""
        rest = ""
        for text in server.read():
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                shown = line.replace(str(self.port), "8000")
                log = LOG_LINE.search(shown)
                if log:
                    self.engine_pid = int(log[3] or self.engine_pid)
                    if SHOWN_LOG.search(shown):
                        screen.write(LOG_LINE.sub(r"\1 \2 ", shown) + "\n", "log")
                elif not STAGE.fullmatch(shown):
                    screen.write_raw(shown + "\n")
                if "curl " in shown:
                    return
        raise TimeoutError("the server was not ready")

    def _complete(self, screen: Screen) -> None:
        body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
        command = f"curl -s localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
        screen.line("# in another terminal", "note")
        screen.command(command)
        asked = command.replace("localhost:8000", f"127.0.0.1:{self.port}")
        screen.line(subprocess.check_output(["bash", "-c", asked], text=True), "output")

    def _chat(self, screen: Screen) -> None:
        screen.command("llmstack chat --seed 3 --max-tokens 150")
        chat = Terminal("chat", "--seed", "3", "--max-tokens", "150", "--url", f"http://127.0.0.1:{self.port}/v1")
        try:
            self._until_prompt(chat, screen)
            self._ask(chat, screen, "Why is the sky blue?", kills=True)
            self._ask(chat, screen, "/set max_tokens 40")
            self._ask(chat, screen, "And why is the sea blue?")
        finally:
            chat.end(signal.SIGKILL)

    def _ask(self, chat: Terminal, screen: Screen, text: str, *, kills: bool = False) -> None:
        screen.write(text + "\n", "command")
        chat.type(text)
        self._until_prompt(chat, screen, echo=text + "\n", kills=kills)

    def _until_prompt(self, chat: Terminal, screen: Screen, *, echo: str = "", kills: bool = False) -> None:
        """Shows what the chat writes until it waits for a line; `echo` is what was typed, and shown before."""
        num_chars, written = 0, ""
        for text in chat.read():
            while echo and text and echo[0] == text[0]:
                echo, text = echo[1:], text[1:]
            written += text
            screen.write_raw(text.replace(str(self.port), "8000"), "output")
            num_chars += len(text)
            if kills and num_chars > 150:
                kills = False
                screen.line(f"# in another terminal: kill -9 {self.engine_pid}, the engine core", "note")
                os.kill(self.engine_pid, signal.SIGKILL)
            if ESCAPE.sub("", written).endswith("> "):
                return
        raise TimeoutError("the chat did not answer")


def main() -> int:
    for name, content in Run().record().items():
        (DOCS / name).write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
