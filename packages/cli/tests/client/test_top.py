"""`llmstack top`: what the stream of a server becomes in the terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from llmstack_command.client.board import Board
from llmstack_command.client.top import style_of
from llmstack_command.client.top_table import Style, top_lines
from llmstack_command.errors import ApiError, CommandLineError
from llmstack_command.main import run_line

PARTS: list[dict[str, Any]] = [
    {
        "num_engines": 1,
        "steps": [[1, 100.0, 20.0, 1, 1, 3, 8, 0, 5], [2, 100.1, 10.0, 1, 1, 3, 8, 0, 1]],
        "runs": [["cmpl-a", 1, 1, "p", 5, 0, 0, [4]], ["cmpl-a", 2, 2, "d", 1, 0, 5, []]],
        "events": [["cmpl-a", 99.5, "waiting"], ["cmpl-a", 100.0, "running"], ["cmpl-\x1b[2J", 100.05, "waiting"]],
    },
    {
        "num_engines": 1,
        "steps": [[3, 100.2, 10.0, 0, 1, 0, 8, 0, 2]],
        "runs": [["cmpl-a", 3, 3, "d", 2, 0, 6, []]],
        "events": [["cmpl-a", 100.21, "finished_length_capped"]],
    },
]


class LiveServer(BaseHTTPRequestHandler):
    """Sends the parts, and ends the stream."""

    def do_GET(self) -> None:
        is_live = self.path in ("/live/events", "/live/events?engine=1")
        self.send_response(200 if is_live else 404)
        self.end_headers()
        for part in PARTS if is_live else []:
            self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), LiveServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def board() -> Board:
    made = Board()
    for part in PARTS:
        made.add(part)
    return made


def lines(made: Board, width: int = 120, height: int = 20, style: Style | None = None) -> list[str]:
    return top_lines({0: made}, width, height, style or Style())


def test_a_request_has_its_waits_and_its_tokens() -> None:
    rows = lines(board(), 80)[3:]
    assert rows[1].split() == ["cmpl-a", "length", "capped", "500", "ms", "520", "ms", "–", "5", "3"]


def test_a_request_whose_first_steps_are_no_longer_kept_was_queued_until_the_first_one() -> None:
    late = board()
    late.add(
        {
            "steps": [],
            "runs": [["cmpl-b", 2, 3, "d", 2, 0, 40, []]],
            "events": [
                ["cmpl-b", 98.0, "waiting"],
                ["cmpl-b", 98.1, "running"],
                ["cmpl-b", 100.21, "finished_aborted"],
            ],
        }
    )
    (row,) = [line for line in lines(late, 80) if line.startswith("cmpl-b")]
    assert row.split() == ["cmpl-b", "aborted", "100", "ms", "–", "–", "0", "2"]


def test_requests_that_are_not_over_stand_first_and_move_no_cursor() -> None:
    rows = lines(board())[3:]
    assert rows[0].startswith("cmpl-\N{REPLACEMENT CHARACTER}[2J")
    assert "waiting" in rows[0]


def test_the_summary_has_the_last_step_and_the_rate_of_ten_seconds() -> None:
    summary = board().summary()
    assert summary.startswith("step 3: 0 running, 1 waiting, 0 of 8 KV blocks, 38 tokens/s, 10.0 ms per step")


def test_a_key_that_is_no_operators_sees_no_waiting_requests_and_no_blocks() -> None:
    made = Board()
    made.add({**PARTS[0], "steps": [[1, 100.0, 20.0, 1, None, None, None, None, 5]]})
    assert made.summary() == "step 1: 1 running, 250 tokens/s, 20.0 ms per step"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 110, 200])
@pytest.mark.parametrize("height", [1, 4, 24, 60])
def test_no_line_is_wider_and_no_picture_higher_than_the_terminal(width: int, height: int) -> None:
    made = board()
    made.notes = ["a shadow scheduler " * 20]
    shown = top_lines({0: made, 1: board()}, width, height, Style())
    assert len(shown) <= height
    assert max(map(len, shown)) <= width


@pytest.mark.parametrize("height", [5, 10, 24])
def test_notes_leave_requests_half_of_the_lines(height: int) -> None:
    made = board()
    made.notes = [f"note {number}" for number in range(30)]
    shown = top_lines({0: made}, 40, height, Style())
    header = next(number for number, line in enumerate(shown) if line.startswith("REQUEST"))
    assert len(shown) == height
    assert len(shown) - header - 1 == min(height // 2, len(made.lanes))


def test_a_wide_terminal_draws_the_last_steps_of_each_request() -> None:
    rows = lines(board(), 160)[2:]
    assert rows[0].endswith(" LAST 60 STEPS")
    assert rows[1].endswith("·")
    assert "▒" in rows[2]
    assert rows[2].rstrip().endswith("━")
    plain = lines(board(), 160, style=Style(has_unicode=False))
    assert "\n".join(plain).replace("\N{REPLACEMENT CHARACTER}", "").isascii()


@pytest.mark.parametrize("state", ["preempted", "swapped", "yielded"])
def test_a_preempted_request_is_drawn_as_such(state: str) -> None:
    made = Board()
    made.add({**PARTS[0], "events": [*PARTS[0]["events"], ["cmpl-a", 100.15, state]]})
    made.add({"steps": [[number, 100.2 + number / 100, 5.0, 0, 1, 0, 8, 1, 0] for number in range(3, 30)],
              "runs": [], "events": []})  # fmt: skip
    row = next(line for line in lines(made, 160) if line.startswith("cmpl-a"))
    assert state in row
    assert row.rstrip().endswith("╌" * 5)


def test_colours_are_for_terminals_that_want_them() -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    assert style_of(terminal, {"TERM": "xterm"}).has_color
    assert not style_of(terminal, {"TERM": "xterm", "NO_COLOR": "1"}).has_color
    assert not style_of(terminal, {"TERM": "dumb"}).has_color
    assert not style_of(io.StringIO(), {"TERM": "xterm"}).has_color
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert not style_of(ascii_only, {}).has_unicode
    assert "\x1b[" in "".join(lines(board(), style=Style(has_color=True)))
    assert "\x1b[" not in "".join(lines(board()))


@pytest.mark.parametrize("part", [{}, {"steps": [[1]], "runs": [], "events": []}, {"steps": 3}])
def test_another_form_is_an_error_of_one_sentence(part: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="another version"):
        Board().add(part)


def test_without_a_terminal_there_is_a_line_per_part(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandLineError, match="incomplete"):  # the server has ended
        run_line(["top", "--url", url])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step 2", "step 3"]


def test_once_prints_what_is_there(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["top", "--url", url, "--once", "--engine", "1"]) == 0
    assert "cmpl-a" in capsys.readouterr().out


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, url: str, columns: int, rows: int, **variables: str) -> None:
        self.descriptor, other = pty.openpty()
        ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        sized = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmstack_command", "top", "--url", url], stdin=other, stdout=other, stderr=other,
            env={**sized, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **variables}, start_new_session=True,
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0) and None,
        )  # fmt: skip
        self.before = termios.tcgetattr(other)
        self.other = other
        self.text = ""

    def wait_for(self, condition: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition(self.text):
            assert time.monotonic() < deadline, self.text
            if select.select([self.descriptor], [], [], 0.1)[0]:
                self.text += os.read(self.descriptor, 65536).decode()

    def end(self) -> int:
        code = self.process.wait(60)
        self.wait_for(lambda text: text.endswith("\x1b[?25h\x1b[?1049l"))
        assert termios.tcgetattr(self.other) == self.before
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        os.close(self.descriptor)
        os.close(self.other)


@pytest.fixture
def terminal(url: str) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(columns: int, rows: int, **variables: str) -> Terminal:
        opened.append(Terminal(url, columns, rows, **variables))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_terminal_shows_the_last_picture_of_a_server_that_went_away(
    terminal: Callable[..., Terminal], is_interrupted: bool
) -> None:
    screen = terminal(80, 24)
    screen.wait_for(lambda text: "connecting again (q ends)" in text and "step 3:" in text)
    picture = screen.text.rpartition("\x1b[H")[2]
    assert "\x1b[34m" not in picture  # there is no room for lanes
    assert set(re.findall(r"520 ms +– +(\d+) +(\d+)", screen.text)) <= {("5", "1"), ("5", "3")}  # none counts twice
    assert max(len(line) for line in picture.replace("\x1b[K", "").replace("\x1b[J", "").split("\r\n")) < 100
    if is_interrupted:
        os.write(screen.descriptor, b"\x03")
    else:
        os.write(screen.descriptor, b"q")
    assert screen.end() == 0


def test_a_large_terminal_without_colours_draws_lanes(terminal: Callable[..., Terminal]) -> None:
    screen = terminal(200, 60, NO_COLOR="1")
    screen.wait_for(lambda text: "LAST 100 STEPS" in text and "step 3:" in text)
    assert "\x1b[1m" not in screen.text
    os.write(screen.descriptor, b"q")
    assert screen.end() == 0


def test_a_terminal_is_drawn_again_when_its_size_changes(terminal: Callable[..., Terminal]) -> None:
    screen = terminal(200, 40, NO_COLOR="1")
    screen.wait_for(lambda text: "LAST 100 STEPS" in text and "step 3:" in text)
    for columns, rows in ((40, 6), (200, 30), (20, 3)):
        begin = len(screen.text)
        ioctl(screen.other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

        def fits(text: str, columns: int = columns, rows: int = rows, begin: int = begin) -> bool:
            picture = text[begin:].rpartition("\x1b[J")[0].rpartition("\x1b[H")[2].replace("\x1b[K", "")
            shown = picture.replace("\r", "").split("\n")
            has_lanes = any("LAST" in line for line in shown)
            return (
                any(shown) and len(shown) <= rows and max(map(len, shown)) <= columns and has_lanes == (columns == 200)
            )

        screen.wait_for(fits)
    os.write(screen.descriptor, b"Q")
    assert screen.end() == 0


def test_a_dumb_terminal_gets_lines_alone(terminal: Callable[..., Terminal]) -> None:
    screen = terminal(80, 24, TERM="dumb")
    screen.wait_for(lambda text: "incomplete" in text)
    assert "\x1b" not in screen.text
    assert screen.process.wait(60) == 1


def test_a_server_that_refuses_is_an_error_below_the_prompt(terminal: Callable[..., Terminal], url: str) -> None:
    screen = Terminal(url.replace("/v1", "/elsewhere/v1"), 80, 24)
    try:
        assert screen.process.wait(60) == 1
        screen.wait_for(lambda text: "404" in text)
        assert "\x1b[?1049h" not in screen.text
    finally:
        screen.close()


def test_weights_and_a_shadow_stand_below_the_summary() -> None:
    made = Board()
    shadow = {"name": "policy=fair\x1b[2J", "sentences": ["First tokens would have come 3 ms earlier."]}
    made.add({**PARTS[0], "weights": {"name": "next", "num_finishing": 2}, "shadow": shadow})
    assert lines(made)[1:4] == [
        "weights: next, 2 requests finish with those before",
        "shadow scheduler policy=fair\N{REPLACEMENT CHARACTER}[2J:",
        "  First tokens would have come 3 ms earlier.",
    ]
    made.add({**PARTS[1], "weights": {"name": "next", "num_finishing": None}, "shadow": None})
    assert made.notes == ["weights: next"]


def test_several_engine_cores_stand_below_each_other() -> None:
    shown = top_lines({0: board(), 1: board()}, 120, 30, Style())
    assert [line.partition(": step")[0] for line in shown[:2]] == ["engine core 0", "engine core 1"]
    assert [line.split()[:2] for line in shown[3:]][1:] == [
        ["0", "cmpl-\N{REPLACEMENT CHARACTER}[2J"], ["1", "cmpl-\N{REPLACEMENT CHARACTER}[2J"],
        ["0", "cmpl-a"], ["1", "cmpl-a"],
    ]  # fmt: skip


def test_predicted_first_tokens_stand_beside_the_real_ones() -> None:
    made = Board()
    made.add({**PARTS[0], "predictions": [["cmpl-a", 480.0, None]]})
    assert " 520 ms    480 ms " in "\n".join(lines(made))
    made.add({**PARTS[1], "predictions": [["cmpl-a", 480.0, 533.0]]})
    assert " 533 ms    480 ms " in "\n".join(lines(made))


def test_steps_that_are_missing_are_said() -> None:
    made = Board()
    made.add({**PARTS[0], "gap": {"reason": "steps_forgotten", "after": 3, "next": 9}})
    assert made.notes == ["steps 4 to 8 are missing"]
    made.add({**PARTS[1], "gap": {"reason": "steps_forgotten", "after": 3, "next": None}})
    assert made.notes == ["steps after 3 are missing"]
    made.add({**PARTS[1], "gap": {"reason": "engine_core_replaced", "after": 9, "next": 1}})
    assert made.notes == ["another engine core: its steps begin again"]


def test_the_steps_of_another_engine_core_begin_again() -> None:
    made = Board()
    made.add({**PARTS[1], "core": "a"})
    made.add({**PARTS[0], "core": "b"})
    assert made.summary().startswith("step 2:")
    assert list(made.steps) == [1, 2]
