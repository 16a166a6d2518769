"""The subcommand `llmstack bench`, imported by `llmstack --help`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Protocol

from llmstack_bench.errors import BenchError


class BenchSubcommand(Protocol):
    """A subcommand of `llmstack bench`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, namespace: argparse.Namespace) -> int:
        """Measures, prints, and returns the exit code; BenchError has a one-line message."""
        ...


# Name to `module:Class` and a line of help; only the requested one is imported.
SUBCOMMANDS = {
    "serve": ("llmstack_bench.commands.serve:ServeBench", "measure one or more OpenAI-compatible servers over HTTP"),
    "throughput": ("llmstack_bench.commands.offline:ThroughputBench", "offline: many requests at once, tokens/s"),
    "latency": ("llmstack_bench.commands.offline:LatencyBench", "offline: one batch, repeated"),
    "sweep": ("llmstack_bench.commands.sweep:SweepBench", "servers over sets of flags, each with each load"),
    "startup": ("llmstack_bench.commands.startup:StartupBench", "from a server's command to its first token"),
}


class BenchCommand:
    """The command `llmstack bench` with its subcommands."""

    name = "bench"
    help = "measure a server over HTTP, the engine offline, or a start"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the subcommand, whose flags have a parser of their own."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        rows = "\n".join(f"  {name:<12}{line}" for name, (_, line) in SUBCOMMANDS.items())
        parser.epilog = f"subcommands:\n{rows}\n\n`{parser.prog} serve --help` describes one of them."
        parser.add_argument("line", nargs=argparse.PARSER, choices=tuple(SUBCOMMANDS), metavar="subcommand")
        parser.set_defaults(parser=parser)

    def subcommands(self) -> dict[str, tuple[str, BenchSubcommand]]:
        """Name to a line of help and the imported subcommand, for shell completion."""
        return {name: (line, load_subcommand(target)) for name, (target, line) in SUBCOMMANDS.items()}

    def run(self, namespace: argparse.Namespace) -> int:
        """Parses the rest of the line for the subcommand and runs it."""
        name, *rest = namespace.line
        target, line = SUBCOMMANDS[name]
        subcommand = load_subcommand(target)
        parser: argparse.ArgumentParser = type(namespace.parser)(
            prog=f"{namespace.parser.prog} {name}", description=line
        )
        subcommand.add_arguments(parser)
        # The parser of `llmstack` suggests the nearest flag; a plain one is sufficient.
        parse = getattr(parser, "parse_line", parser.parse_args)
        try:
            return subcommand.run(parse(rest))
        except BenchError as error:
            sys.stderr.write(f"{parser.prog}: error: {error}\n")
            return error.exit_code


def load_subcommand(target: str) -> BenchSubcommand:
    """An instance of `module:Class`."""
    module_name, _, attribute = target.partition(":")
    subcommand: BenchSubcommand = getattr(importlib.import_module(module_name), attribute)()
    return subcommand
