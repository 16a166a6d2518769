"""What a person or a pipe says, and what is shown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from llmstack_command.client import terminal as terminal_module
from llmstack_command.client.terminal import Terminal
from llmstack_command.errors import ApiError


class Person(io.StringIO):
    """Standard input of a terminal."""

    def isatty(self) -> bool:
        return True


class Screen(io.StringIO):
    """A terminal's output."""

    def isatty(self) -> bool:
        return True


def test_a_pipe_is_one_message():
    assert list(Terminal(io.StringIO("two\nlines\n"), io.StringIO()).messages()) == ["two\nlines\n"]


@pytest.mark.parametrize(("text", "words"), [("", "empty"), (" \n", "empty"), ("x" * 11, "longer than 10")])
def test_a_pipe_without_a_message_is_an_error(text: str, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(terminal_module, "MAX_INPUT_CHARS", 10)
    with pytest.raises(ApiError, match=words):
        list(Terminal(io.StringIO(text), io.StringIO()).messages())


def test_bytes_that_are_no_text_are_an_error():
    with pytest.raises(ApiError, match="UTF-8"):
        list(Terminal(io.TextIOWrapper(io.BytesIO(b"\xff\xfe")), io.StringIO()).messages())


def test_a_pipe_gets_exactly_the_answer():
    out = io.StringIO()
    shown = Terminal(io.StringIO(), out)
    shown.write("thinking", is_aside=True)
    shown.write("a\x1b[2Jb")
    shown.end_answer()
    assert out.getvalue() == "a\x1b[2Jb\n"


def test_a_screen_shows_no_control_characters_of_a_model():
    screen = Screen()
    Terminal(io.StringIO(), screen).write("a\x1b]0;title\x07\tb\nc\x9b")
    assert (
        screen.getvalue()
        == "a\N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER}\tb\nc\N{REPLACEMENT CHARACTER}"
    )


def test_reasoning_is_dim_on_a_screen():
    screen = Screen()
    shown = Terminal(io.StringIO(), screen)
    shown.write("so", is_aside=True)
    shown.write(" then", is_aside=True)
    shown.write("yes")
    shown.end_answer()
    assert screen.getvalue() == "\x1b[2mso then\x1b[0m\n\nyes\n"


def test_a_message_of_several_lines_ends_with_its_quotes_or_its_last_backslash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = iter(['"""one', "two", 'three"""', "a\\", "b", '"""whole"""', '"""open'])

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    terminal = Terminal(Person(), io.StringIO())
    assert list(terminal.messages()) == ["one\ntwo\nthree", "a\nb", "whole", "open"]


def test_the_history_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    pytest.importorskip("readline", reason="this Python has no readline")
    path = tmp_path / "state" / "history"
    terminal = Terminal(Person(), io.StringIO())
    terminal.open_history(path)
    terminal.save_history(path)
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "file").write_text("")
    terminal.save_history(tmp_path / "file" / "history")  # cannot be written, which is no error
