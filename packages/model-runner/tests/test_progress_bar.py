"""A terminal shows a bar while items are taken; a file and a log of JSON objects never contain one."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from llmstack_model_runner.progress_bar import with_progress
from llmstack_types.log_lines import LogFormatter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def seconds(step_s: float) -> Iterator[float]:
    now_s = 0.0
    while True:
        yield now_s
        now_s += step_s


def taken(stream: io.StringIO, step_s: float, total: int = 4) -> list[str]:
    """What was on the line of the terminal, one text after the other."""
    times = seconds(step_s)
    assert list(with_progress("load", range(4), total, stream=stream, clock=lambda: next(times))) == [0, 1, 2, 3]
    return stream.getvalue().split("\r\x1b[2K")[1:]


def test_a_terminal_shows_the_share_that_was_taken_and_an_empty_line_in_the_end() -> None:
    *bars, last = taken(Terminal(), 1.0)
    assert [bar[-4:] for bar in bars] == ["  0%", " 25%", " 50%", " 75%"]
    assert bars[2] == f"load {'█' * 15}{'░' * 15}  50%"
    assert last == ""


@pytest.mark.parametrize(("total", "shares"), [(2, ["  0%", " 50%", "100%", "100%"]), (0, ["100%"] * 4)])
def test_a_wrong_number_of_items_changes_the_bar_alone(total: int, shares: list[str]) -> None:
    assert [bar[-4:] for bar in taken(Terminal(), 1.0, total)[:-1]] == shares


def test_what_is_quick_and_what_is_no_terminal_show_nothing() -> None:
    assert taken(Terminal(), 0.01) == []
    assert taken(io.StringIO(), 1.0) == []


def test_a_log_of_json_objects_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(LogFormatter("json"))
    monkeypatch.setattr(logging.root, "handlers", [handler])
    assert taken(Terminal(), 1.0) == []


def test_the_line_is_empty_after_an_error_too() -> None:
    terminal, times = Terminal(), seconds(1.0)
    items = with_progress("load", range(4), 4, stream=terminal, clock=lambda: next(times))
    next(items)
    items.close()  # type: ignore[attr-defined]  # a generator
    assert terminal.getvalue().endswith("\r\x1b[2K")
