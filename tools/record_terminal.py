"""Writes docs/terminal.svg, the terminal of the front page, from a real run: `python tools/record_terminal.py`.

The run starts `llmstack serve` with the demo model, sends a completion with curl, and kills the engine core while
`llmstack chat` prints an answer. Output appears at the times of the run; pauses are cut to `MAX_PAUSE_S`. The picture
leaves out most lines of the log and shows port 8000 in place of the free one that the run used.
"""

from __future__ import annotations

import html
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

SVG = Path(__file__).resolve().parent.parent / "docs" / "terminal.svg"
COLUMNS = 98
CHAR_WIDTH, LINE_HEIGHT, MARGIN, BAR = 7.8, 19, 16, 30
MAX_PAUSE_S = 1.0
TYPING_S = 0.6  # how long a command is on the screen before its output
SHOWN_LOG = re.compile(
    r"listening on|is ready on|engine core .*(died|dead|gone|start|restart|recover|replac)", re.IGNORECASE
)
COLOURS = {"prompt": "#7ee787", "command": "#e6edf3", "output": "#c9d1d9", "log": "#8b949e", "note": "#d2a8ff"}


@dataclass
class Screen:
    """What appeared on the terminal: pieces of text, each with its row, column, style and time."""

    pieces: list[tuple[int, int, str, str, float]] = field(default_factory=list)
    row: int = 0
    column: int = 0
    clock_s: float = 0.0
    last_s: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tick(self) -> None:
        """Advances the picture's clock by the time since the last piece, without long pauses."""
        now = time.monotonic()
        self.clock_s += min(now - self.last_s, MAX_PAUSE_S)
        self.last_s = now

    def write(self, text: str, style: str) -> None:
        """Appends text at the cursor; long lines wrap."""
        with self.lock:
            self.tick()
            for index, line in enumerate(text.split("\n")):
                if index:
                    self.row, self.column = self.row + 1, 0
                self._write_line(line, style)

    def _write_line(self, line: str, style: str) -> None:
        """Writes at the cursor; a line that does not fit breaks at a space where there is one."""
        while line:
            room = COLUMNS - self.column
            space = line.rfind(" ", 0, room + 1)
            if len(line) > room and space <= 0 < self.column and len(line) <= COLUMNS:
                end = 0
            else:
                end = len(line) if len(line) <= room else space + 1 if space > 0 else room
            text = line[:end] if self.column else line[:end].lstrip()
            self.pieces.append((self.row, self.column, text, style, self.clock_s))
            self.column += len(text)
            line = line[end:]
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

    def svg(self) -> str:
        """The picture: an animation where styles are animated, the last state elsewhere."""
        width = COLUMNS * CHAR_WIDTH + 2 * MARGIN
        height = (max(piece[0] for piece in self.pieces) + 1) * LINE_HEIGHT + 2 * MARGIN + BAR
        texts = "\n".join(self._text(*piece) for piece in self.pieces if piece[2].strip())
        dots = "".join(f'<circle cx="{x}" cy="16" r="5" fill="#484f58"/>' for x in (20, 38, 56))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
            f'aria-label="A terminal: llmstack serve starts, curl gets a completion, and a chat continues after its '
            f'engine was killed">\n<style>text{{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'
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


class Run:
    """One server with the demo model, and the commands against it."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.screen = Screen()
        self.engine_pid = 0
        self.ready = threading.Event()

    def record(self) -> str:
        """Plays all commands and returns the picture."""
        self.screen.command("llmstack serve &")
        environment = {**os.environ, "LLMSTACK_PORT": str(self.port)}
        server = subprocess.Popen(
            [sys.executable, "-m", "llmstack_command", "serve"], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        reader = threading.Thread(target=self._read_log, args=(server,), daemon=True)
        reader.start()
        try:
            if not self.ready.wait(60):
                raise TimeoutError("the server was not ready within a minute")
            self._complete()
            self._chat()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            reader.join(10)
        return self.screen.svg()

    def _read_log(self, server: subprocess.Popen[str]) -> None:
        for line in server.stdout or ():
            engine = re.match(r"\(engine-core (\d+)\)", line)
            self.engine_pid = int(engine[1]) if engine else self.engine_pid
            if SHOWN_LOG.search(line):
                shown = line.rstrip().replace(str(self.port), "8000")
                shown = re.sub(r"^(\S+) (\w+) +[\w.]+: ", r"\1 ", shown)
                self.screen.line(shown, "log")
            if "is ready on" in line:
                self.ready.set()

    def _complete(self) -> None:
        body = '{"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}'
        command = f"curl -s localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{body}'"
        self.screen.command(command)
        self.screen.line(subprocess.check_output(self._shell(command), text=True), "output")

    def _chat(self) -> None:
        command = 'llmstack chat -q "Tell me a story about a fox." --seed 3 --max-tokens 150'
        self.screen.command(f"{command} &")
        chat = subprocess.Popen(self._shell(f"{command} --url http://localhost:8000/v1"), stdout=subprocess.PIPE)
        num_bytes, is_killed = 0, False
        while chat.stdout is not None and (data := os.read(chat.stdout.fileno(), 64)):
            self.screen.write(data.decode(errors="replace").replace("\n", " "), "output")
            num_bytes += len(data)
            if num_bytes > 150 and not is_killed:
                self.screen.command(f"kill -9 {self.engine_pid}   # the engine core, in the middle of the answer")
                os.kill(self.engine_pid, signal.SIGKILL)
                is_killed = True
        chat.wait(60)

    def _shell(self, command: str) -> list[str]:
        """A command line of the picture as it is run: at the server's port, with this Python's `llmstack`."""
        llmstack = f"{sys.executable} -m llmstack_command "
        return [
            "bash",
            "-c",
            command.replace("localhost:8000", f"127.0.0.1:{self.port}").replace("llmstack ", llmstack),
        ]


def main() -> int:
    SVG.write_text(Run().record(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
