"""`llmstack top`: what the stream of a server becomes in the terminal."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from llmstack_command.client.top import Board
from llmstack_command.errors import ApiError, CommandLineError
from llmstack_command.main import run_line

PARTS: list[dict[str, Any]] = [
    {
        "num_engines": 1,
        "steps": [[1, 100.0, 20.0, 1, 1, 3, 8, 0, 5], [2, 100.1, 10.0, 1, 1, 3, 8, 0, 1]],
        "runs": [["cmpl-a", 1, 1, "p", 5, 0, 1], ["cmpl-a", 2, 2, "d", 1, 0, 0]],
        "events": [["cmpl-a", 99.5, "waiting"], ["cmpl-a", 100.0, "running"], ["cmpl-\x1b[2J", 100.05, "waiting"]],
    },
    {
        "num_engines": 1,
        "steps": [[3, 100.2, 10.0, 0, 1, 0, 8, 0, 2]],
        "runs": [["cmpl-a", 3, 3, "d", 2, 0, 0]],
        "events": [["cmpl-a", 100.21, "finished_length_capped"]],
    },
]


class LiveServer(BaseHTTPRequestHandler):
    """Sends the parts, and ends the stream."""

    def do_GET(self) -> None:
        is_live = self.path == "/live/events?engine=0"
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


def test_a_request_has_its_waits_and_its_tokens() -> None:
    rows = board().lines(20)[3:]
    assert rows[1].split() == ["cmpl-a", "length", "capped", "(ended)", "500", "ms", "520", "ms", "–", "5", "3"]


def test_requests_that_are_not_over_stand_first_and_move_no_cursor() -> None:
    rows = board().lines(20)[3:]
    assert rows[0].startswith("cmpl-\N{REPLACEMENT CHARACTER}[2J")
    assert "waiting" in rows[0]


def test_the_summary_has_the_last_step_and_the_rate_of_ten_seconds() -> None:
    summary = board().summary()
    assert summary.startswith("step 3: 0 running, 1 waiting, 0 of 8 KV blocks, 38 tokens/s, 10.0 ms per step")


def test_there_are_as_many_lines_as_the_terminal_has() -> None:
    assert [len(board().lines(height)) for height in (1, 4, 50)] == [1, 4, 5]


@pytest.mark.parametrize("part", [{}, {"steps": [[1]], "runs": [], "events": []}, {"steps": 3}])
def test_another_form_is_an_error_of_one_sentence(part: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="another version"):
        Board().add(part)


def test_without_a_terminal_there_is_a_line_per_part(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CommandLineError, match="incomplete"):  # the server has ended
        run_line(["top", "--url", url])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step 2", "step 3"]


def test_once_prints_what_is_there(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["top", "--url", url, "--once"]) == 0
    assert "cmpl-a" in capsys.readouterr().out


def test_a_terminal_is_drawn_again_and_gets_its_cursor_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", screen)
    with pytest.raises(CommandLineError):
        run_line(["top", "--url", url])
    assert screen.getvalue().count("\x1b[H\x1b[J") == 2
    assert screen.getvalue().endswith("\x1b[?25h\n")


def test_weights_and_a_shadow_stand_below_the_summary() -> None:
    made = Board()
    shadow = {"name": "policy=fair\x1b[2J", "sentences": ["First tokens would have come 3 ms earlier."]}
    made.add({**PARTS[0], "weights": {"name": "next", "num_finishing": 2}, "shadow": shadow})
    assert made.lines(9)[1:4] == [
        "weights: next, 2 requests finish with those before",
        "shadow scheduler policy=fair\N{REPLACEMENT CHARACTER}[2J:",
        "  First tokens would have come 3 ms earlier.",
    ]
    made.add({**PARTS[1], "weights": {"name": "next", "num_finishing": None}, "shadow": None})
    assert made.notes == ["weights: next"]


def test_predicted_first_tokens_stand_beside_the_real_ones() -> None:
    made = Board()
    made.add({**PARTS[0], "predictions": [["cmpl-a", 480.0, None]]})
    assert " 520 ms     480 ms " in "\n".join(made.lines(20))
    made.add({**PARTS[1], "predictions": [["cmpl-a", 480.0, 533.0]]})
    assert " 533 ms     480 ms " in "\n".join(made.lines(20))


def test_steps_that_are_missing_are_said() -> None:
    made = Board()
    made.add({**PARTS[0], "gap": {"reason": "steps_forgotten", "after": 3, "next": 9}})
    assert made.notes == ["steps 4 to 8 are missing"]
    made.add({**PARTS[1], "gap": {"reason": "engine_core_replaced", "after": 9, "next": 1}})
    assert made.notes == ["another engine core: its steps begin again"]


def test_the_steps_of_another_engine_core_begin_again() -> None:
    made = Board()
    made.add({**PARTS[1], "core": "a"})
    made.add({**PARTS[0], "core": "b"})
    assert made.summary().startswith("step 2:")
    assert list(made.steps) == [1, 2]
