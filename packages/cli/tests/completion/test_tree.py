"""What is read off the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmstack_command.completion.tree import Flag, Level, describe_commands
from llmstack_command.discovery import CommandSource, find_commands


class InnerCommand:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--depth", type=int, choices=[1, 2], help="how deep (default: 1)")


class OuterCommand:
    name = "outer"
    help = "everything there is"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("kind", choices=["a", "b"])
        parser.add_argument("model", nargs="?")
        parser.add_argument("--out", "-o", metavar="FILE", help="100%% of it; more")
        parser.add_argument("--from", type=Path)
        parser.add_argument("--fast", action=argparse.BooleanOptionalAction)
        parser.add_argument("--secret", help=argparse.SUPPRESS)

    def run(self, namespace: argparse.Namespace) -> int:
        return 0

    def subcommands(self) -> Mapping[str, tuple[str, InnerCommand]]:
        return {"inner": ("inside", InnerCommand())}


@dataclass(frozen=True)
class HeldSource:
    """A source whose command is available."""

    command: OuterCommand

    def load(self) -> OuterCommand:
        return self.command


def test_a_command_is_described_as_its_parser_declares_it():
    outer, inner = describe_commands({"outer": HeldSource(OuterCommand())})
    assert outer == Level(
        ("outer",),
        "everything there is",
        (
            Flag(("-h", "--help"), "show this help message and exit"),
            Flag(("--out", "-o"), "100% of it", has_value=True, is_file=True),
            Flag(("--from",), "", has_value=True, is_file=True),
            Flag(("--fast", "--no-fast"), ""),
        ),
        values=("a", "b"),
        has_positional=True,
    )
    assert inner.words == ("outer", "inner")
    assert inner.flags[1] == Flag(("--depth",), "how deep", ("1", "2"), has_value=True)


def test_a_command_that_cannot_be_loaded_is_left_out():
    broken = CommandSource("broken", "no_such_module_anywhere:Command")
    assert [level.words for level in describe_commands({"broken": broken, "outer": HeldSource(OuterCommand())})] == [
        ("outer",),
        ("outer", "inner"),
    ]


def test_every_built_in_command_is_described():
    described = {level.words[0] for level in describe_commands(find_commands())}
    assert {"chat", "complete", "collect-env", "completion", "versions"} <= described
