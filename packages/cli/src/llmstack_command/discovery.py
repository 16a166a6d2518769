"""Finds subcommands: built in, from the entry point group `llmstack.commands`, or next to us on the path."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

from llmstack_command.errors import CommandLineError
from llmstack_command.protocols import Command

GROUP = "llmstack.commands"

BUILT_IN = {
    "chat": "llmstack_command.client.commands:ChatCommand",
    "collect-env": "llmstack_command.collect_env.command:CollectEnvCommand",
    "complete": "llmstack_command.client.commands:CompleteCommand",
    "completion": "llmstack_command.completion.command:CompletionCommand",
    "versions": "llmstack_command.builtin:VersionsCommand",
}

# Entry points exist only where a distribution is installed; over PYTHONPATH these are looked for by name.
FALLBACKS = {
    "bench": "llmstack_bench.commands:BenchCommand",
    "replay": "llmstack_engine_core.commands.replay:ReplayCommand",
    "run-batch": "llmstack_server.batch.command:RunBatchCommand",
    "serve": "llmstack_server.commands:ServeCommand",
    "simulate": "llmstack_engine_core.commands.simulate:SimulateCommand",
}


@dataclass(frozen=True, slots=True)
class CommandSource:
    """Where a subcommand comes from; nothing is imported until `load`.

    Attributes:
        target: `module:attribute`; the attribute is a `Command`, or a class of one without arguments.
    """

    name: str
    target: str

    def load(self) -> Command:
        """Imports the command.

        Raises:
            CommandLineError: It cannot be imported; the text says why.
        """
        module_name, _, attribute = self.target.partition(":")
        try:
            found = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            message = f"the command '{self.name}' ({self.target}) cannot be loaded: {error}"
            raise CommandLineError(message, exit_code=1) from error
        command: Command = found() if isinstance(found, type) else found
        return command


def find_commands() -> dict[str, CommandSource]:
    """Subcommand name to its source, sorted by name; a built-in one wins over an entry point of its name."""
    found = {name: CommandSource(name, target) for name, target in FALLBACKS.items() if _is_importable(target)}
    found |= {source.name: source for source in _from_entry_points()}
    found |= {name: CommandSource(name, target) for name, target in BUILT_IN.items()}
    return dict(sorted(found.items()))


def _from_entry_points() -> Iterable[CommandSource]:
    # Sorted backwards: where two distributions claim one name, the first in the alphabet is taken, on every machine.
    for entry_point in sorted(
        importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.value, reverse=True
    ):
        yield CommandSource(entry_point.name, f"{entry_point.module}:{entry_point.attr}")


def _is_importable(target: str) -> bool:
    """True when the target's package is on the path, without importing it."""
    return importlib.util.find_spec(target.partition(":")[0].partition(".")[0]) is not None
