"""Entry point of the command: selects, parses and runs a subcommand."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence

from llmstack_command.builtin import command_version
from llmstack_command.discovery import BUILT_IN, CommandSource, find_command, find_commands
from llmstack_command.errors import CommandLineError, did_you_mean
from llmstack_command.parser import CommandParser
from llmstack_command.protocols import CheckedCommand

DESCRIPTION = "Serve and use large language models."
NO_PROVIDER = "no installed package serves models; run: pip install llmstack-server"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `llmstack` with `arguments` (default: the process's) and returns the exit code."""
    line = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return run_line(line)
    except CommandLineError as error:
        for sentence in str(error).splitlines():
            print(f"{error.prog}: error: {sentence}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has exited (`llmstack --help | head`). The interpreter's last flush must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def run_line(line: Sequence[str]) -> int:
    """Runs one command line and returns the exit code.

    Raises:
        CommandLineError: The command line is invalid, or something it needs is missing.
    """
    if not line or line[0] in ("-h", "--help", "help"):
        print(overview(find_commands()))
        return 0
    if line[0] in ("-V", "--version", "version"):
        print(f"llmstack {command_version()}")
        return 0
    return run_command(find_command(line[0]) or choose(find_commands(), line[0]), line[1:])


def choose(commands: Mapping[str, CommandSource], name: str) -> CommandSource:
    """The source of the subcommand `name`.

    Raises:
        CommandLineError: There is none; the text suggests the nearest name.
    """
    if name in commands:
        return commands[name]
    if name.startswith("-"):
        flag = name.partition("=")[0]
        suggestion = did_you_mean(flag, ["--help", "--version"]) or "; flags follow the command, see llmstack --help"
        raise CommandLineError(f"unknown flag '{flag}'{suggestion}")
    if not has_provider(commands):
        raise CommandLineError(f"unknown command '{name}': {NO_PROVIDER}", exit_code=1)
    suggestion = did_you_mean(name, commands) or f"; commands are {', '.join(commands)}"
    raise CommandLineError(f"unknown command '{name}'{suggestion}")


def run_command(source: CommandSource, line: Sequence[str]) -> int:
    """Loads one subcommand, parses its part of the line and runs it."""
    gc.disable()  # what is declared stays, so that there is nothing to collect before the line is parsed
    try:
        command = source.load()
        parser = CommandParser(prog=f"llmstack {command.name}", description=command.help)
        command.add_arguments(parser)
        check = command.problems if isinstance(command, CheckedCommand) else None
        namespace = parser.parse_line(line, check)
    finally:
        gc.enable()
    return command.run(namespace)


def overview(commands: Mapping[str, CommandSource]) -> str:
    """The text of `llmstack --help`."""
    rows = "\n".join(f"  {name:<12} {_one_line(source)}" for name, source in commands.items())
    hint = "" if has_provider(commands) else f"\n{NO_PROVIDER}\n"
    return f"""usage: llmstack [--help] [--version] command ...

{DESCRIPTION}

commands:
{rows}
{hint}
`llmstack command --help` describes one command."""


def has_provider(commands: Mapping[str, CommandSource]) -> bool:
    """True when an installed package provides commands."""
    return any(name not in BUILT_IN for name in commands)


def _one_line(source: CommandSource) -> str:
    try:
        return source.load().help
    except CommandLineError as error:
        # A broken package must not prevent the help of the others.
        return f"({error})"
