"""Discovery of subcommands: built in, of the packages here, or by entry point."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import NamedTuple

from llmstack_command.entry_points import find_entry_points
from llmstack_command.errors import CommandLineError
from llmstack_command.protocols import Command

GROUP = "llmstack.commands"

BUILT_IN = {
    "chat": "llmstack_command.client.commands:ChatCommand",
    "collect-env": "llmstack_command.builtin:CollectEnvCommand",
    "complete": "llmstack_command.client.commands:CompleteCommand",
    "completion": "llmstack_command.builtin:CompletionCommand",
    "doctor": "llmstack_command.builtin:DoctorCommand",
    "top": "llmstack_command.client.commands:TopCommand",
    "versions": "llmstack_command.builtin:VersionsCommand",
}

# Those of this project's packages. They have entry points, too; to read those of all distributions takes longer than
# to parse a line, and there are none where the packages are only on PYTHONPATH.
OF_PACKAGES = {
    "bench": "llmstack_bench.commands:BenchCommand",
    "cluster-key": "llmstack_engine_client.commands.cluster_key:ClusterKeyCommand",
    "explain": "llmstack_insight.commands.explain:ExplainCommand",
    "logprobs": "llmstack_server.commands:LogprobsCommand",
    "receipt-key": "llmstack_server.commands:ReceiptKeyCommand",
    "replay": "llmstack_insight.commands.replay:ReplayCommand",
    "run-batch": "llmstack_server.commands:RunBatchCommand",
    "serve": "llmstack_server.commands:ServeCommand",
    "simulate": "llmstack_insight.commands.simulate:SimulateCommand",
    "transcribe": "llmstack_server.commands:TranscribeCommand",
    "tune": "llmstack_insight.commands.tune:TuneCommand",
    "verify": "llmstack_server.commands:VerifyCommand",
}


class CommandSource(NamedTuple):
    """The source of a subcommand, which is imported by `load` only.

    Attributes:
        target: `module:attribute`; the attribute is a `Command`, or a class of one without arguments.
    """

    name: str
    target: str

    def load(self) -> Command:
        """Imports the command.

        Raises:
            CommandLineError: It cannot be imported; the text gives the reason.
        """
        module_name, _, attribute = self.target.partition(":")
        try:
            found = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            message = f"the command '{self.name}' ({self.target}) cannot be loaded: {error}"
            raise CommandLineError(message, exit_code=1) from error
        command: Command = found() if isinstance(found, type) else found
        return command


def find_command(name: str) -> CommandSource | None:
    """The source of a command of this project, found by name alone; None for any other."""
    target = BUILT_IN.get(name) or OF_PACKAGES.get(name)
    return CommandSource(name, target) if target and _is_importable(target) else None


def find_commands() -> dict[str, CommandSource]:
    """Subcommand name to its source, sorted by name; no entry point replaces a command of this project."""
    found = {source.name: source for source in _from_entry_points()}
    found |= {name: own for name in (*BUILT_IN, *OF_PACKAGES) if (own := find_command(name))}
    return dict(sorted(found.items()))


def _from_entry_points() -> Iterable[CommandSource]:
    # Sorted backwards: of two distributions with the same command, the first in the alphabet is chosen everywhere.
    for name, value in sorted(find_entry_points(GROUP), key=lambda entry: entry[1], reverse=True):
        yield CommandSource(name, value)


def _is_importable(target: str) -> bool:
    """True when the target's package is on the path, without importing it."""
    return importlib.util.find_spec(target.partition(":")[0].partition(".")[0]) is not None
