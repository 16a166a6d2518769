"""What the command needs of a subcommand, by shape; any package can provide one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
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
        """Does the work and returns the exit code; says its own errors in one line on standard error."""
        ...


class Subcommand(Protocol):
    """One word after a command that is a group, such as `serve` in `llmstack bench serve`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares flags and positionals."""
        ...


@runtime_checkable
class CommandGroup(Protocol):
    """What a `Command` with subcommands says besides, so that shells can complete them."""

    def subcommands(self) -> Mapping[str, tuple[str, Subcommand]]:
        """Word to a line of help and the subcommand."""
        ...
