"""The tree of commands, flags and values, from the parsers of the commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmstack_command.discovery import CommandSource
from llmstack_command.errors import CommandLineError
from llmstack_command.parser import CommandParser
from llmstack_command.protocols import CommandGroup

_FILE_METAVARS = frozenset({"FILE", "PATH", "DIR", "FOLDER"})


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        names: Its spellings, such as `-q` and `--quick`.
        choices: Its possible values, if they are few.
        has_value: Whether it has a value.
        is_file: Whether the value is a file or a folder.
    """

    names: tuple[str, ...]
    help: str
    choices: tuple[str, ...] = ()
    has_value: bool = False
    is_file: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A command or a subcommand, with its flags.

    Attributes:
        words: The words after `llmstack`, such as `("bench", "serve")`.
        values: Possible words besides flags: subcommands or choices; empty if any word is possible.
        has_positional: Whether other words are possible, which are completed as files.
    """

    words: tuple[str, ...]
    help: str
    flags: tuple[Flag, ...]
    values: tuple[str, ...] = ()
    has_positional: bool = False


def describe_commands(commands: Mapping[str, CommandSource]) -> list[Level]:
    """Every level of the command line below `llmstack`; commands that cannot be loaded are left out."""
    return [level for source in commands.values() for level in _describe_source(source)]


def _describe_source(source: CommandSource) -> Iterator[Level]:
    try:
        command = source.load()
    except CommandLineError:
        return  # a broken package must not prevent the completion of the others
    yield _describe((command.name,), command.help, command)
    if isinstance(command, CommandGroup):
        for name, (line, subcommand) in command.subcommands().items():
            yield _describe((command.name, name), line, subcommand)


def _describe(words: tuple[str, ...], line: str, command: Any) -> Level:
    parser = CommandParser(prog=" ".join(("llmstack", *words)), description=line)
    command.add_arguments(parser)
    # argparse has no public access to the arguments of a parser.
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    positionals = [action for action in shown if not action.option_strings]
    values = tuple(str(choice) for action in positionals for choice in action.choices or ())
    flags = tuple(_flag(action) for action in shown if action.option_strings)
    return Level(words, line, flags, values, has_positional=any(action.choices is None for action in positionals))


def _flag(action: argparse.Action) -> Flag:
    has_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    return Flag(
        names=tuple(action.option_strings),
        help=_one_line(action),
        choices=tuple(str(choice) for choice in action.choices or ()),
        has_value=has_value,
        is_file=has_value and (action.metavar in _FILE_METAVARS or action.type is Path),
    )


def _one_line(action: argparse.Action) -> str:
    text = " ".join((action.help or "").split()).replace("%%", "%")
    return text.partition(";")[0].partition(" (default")[0]
