"""Protocols of subcommands, which any package can provide."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


class Command(Protocol):
    """One subcommand. Its module must import quickly: `llmstack --help` loads every command's module."""

    @property
    def name(self) -> str:
        """The word after `llmstack`."""
        ...

    @property
    def help(self) -> str:
        """One line for `llmstack --help`."""
        ...

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares flags and positionals."""
        ...

    def run(self, namespace: argparse.Namespace) -> int:
        """Runs the command and returns the exit code; errors are one line on standard error."""
        ...


@runtime_checkable
class CheckedCommand(Protocol):
    """A `Command` that checks its values itself, so that all errors of a line are reported together."""

    def problems(self, namespace: argparse.Namespace) -> Sequence[str]:
        """A sentence for each wrong value; the command runs only if there is none.

        `namespace.exit_code`, where it is set here, is the exit code in that case; else it is 2.
        """
        ...


class Subcommand(Protocol):
    """A subcommand of a command, such as `serve` in `llmstack bench serve`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares flags and positionals."""
        ...


@runtime_checkable
class CommandGroup(Protocol):
    """A `Command` with subcommands, which shells can complete."""

    def subcommands(self) -> Mapping[str, tuple[str, Subcommand]]:
        """Word to a line of help and the subcommand."""
        ...
