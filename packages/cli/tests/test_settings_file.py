"""Flags out of a file: what the command line says wins, and a key that is no flag is named."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import pytest

from llmstack_command.errors import CommandLineError
from llmstack_command.parser import CommandParser


class FileAction(argparse.Action):
    """A file whose content the test gives."""

    content: Mapping[str, Any] = {}

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values)

    def settings(self, path: str) -> Mapping[str, Any]:
        if path == "absent":
            raise argparse.ArgumentTypeError("No such file")
        return self.content


def parse(line: list[str], content: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(FileAction, "content", content)
    parser = CommandParser("llmstack serve", "")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--config", action=FileAction)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--names", "-n", nargs="+", action="extend")
    parser.add_argument("--flag", action="store_true")
    parser.add_argument("--choice", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json")
    return parser.parse_line(line)


def test_the_file_sets_what_the_line_does_not(monkeypatch: pytest.MonkeyPatch):
    content = {"--port": 5, "--flag": True, "--choice": False, "--json": {"a": [1, None]}, "--names": ["x", "-y"]}
    found = parse(["--config", "f", "gpt2"], content, monkeypatch)
    assert (found.port, found.flag, found.choice, found.json) == (5, True, False, '{"a": [1, null]}')
    assert (found.names, found.model, found.config) == (["x", "-y"], "gpt2", "f")


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        (["--port", "8000", "--config", "f"], "port", 8000),
        (["--config=f", "--port=7"], "port", 7),
        (["--config", "f", "-n", "c"], "names", ["c"]),
        (["--config", "f", "--choice"], "choice", True),
        (["--config", "f", "--no-choice"], "choice", False),
        (["--json.b", "2", "--config", "f"], "json", '{"b": 2}'),
    ],
)
def test_the_line_wins_wherever_it_stands(line: list[str], field: str, value: Any, monkeypatch: pytest.MonkeyPatch):
    content = {"--port": 5, "--names": ["a", "b"], "--choice": True, "--json": {"a": 1}}
    assert getattr(parse(line, content, monkeypatch), field) == value


def test_false_and_null_leave_a_plain_flag_off(monkeypatch: pytest.MonkeyPatch):
    found = parse(["--config", "f"], {"--flag": False, "--port": None}, monkeypatch)
    assert (found.flag, found.port) == (False, 8000)


def test_keys_of_json_may_be_written_out(monkeypatch: pytest.MonkeyPatch):
    assert parse(["--config", "f"], {"--json.a.b_c": "x"}, monkeypatch).json == '{"a": {"b_c": "x"}}'


@pytest.mark.parametrize(
    ("line", "content", "message"),
    [
        (["--config", "f"], {"--prt": 1}, "--config f: unknown key 'prt'; did you mean 'port'?"),
        (["--config", "f"], {"--config": "g"}, "--config f: unknown key 'config'"),
        (["--config", "absent"], {}, "--config absent: No such file"),
        (["--config", "f", "--config", "g"], {}, "--config: one file at most"),
        (["--config", "f"], {"--port": "x"}, "--port: invalid int value: 'x'"),
        (["--config"], {}, "--config: expected one argument"),
    ],
)
def test_mistakes_are_named(line: list[str], content: Mapping[str, Any], message: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(CommandLineError) as caught:
        parse(line, content, monkeypatch)
    assert str(caught.value).startswith(message)


def test_after_the_separator_nothing_is_a_flag(monkeypatch: pytest.MonkeyPatch):
    assert parse(["--", "--config"], {"--port": 1}, monkeypatch).model == "--config"
