"""The subcommand `llmstack bench` and its own subcommands; light, since `llmstack --help` imports it."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Protocol

from llmstack_bench.errors import BenchError


class BenchSubcommand(Protocol):
    """One word after `llmstack bench`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares its flags."""
        ...

    def run(self, namespace: argparse.Namespace) -> int:
        """Measures, prints, returns the exit code; raises BenchError with one line."""
        ...


# Name to `module:Class` and a line of help; only the one that is asked for is imported.
SUBCOMMANDS = {
    "serve": ("llmstack_bench.commands.serve:ServeBench", "load any OpenAI-compatible server over HTTP, or several"),
    "throughput": ("llmstack_bench.commands.throughput:ThroughputBench", "offline: many requests at once, tokens/s"),
    "latency": ("llmstack_bench.commands.latency:LatencyBench", "offline: one batch again and again"),
    "startup": ("llmstack_bench.commands.startup:StartupBench", "from a server's command to its first token"),
}


class BenchCommand:
    """`llmstack bench serve|throughput|latency|startup`."""

    name = "bench"
    help = "measure a server over HTTP, the engine offline, or a start"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the subcommand; its flags are its own parser's, of the same kind as this one."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        rows = "\n".join(f"  {name:<12}{line}" for name, (_, line) in SUBCOMMANDS.items())
        parser.epilog = f"subcommands:\n{rows}\n\n`{parser.prog} serve --help` describes one of them."
        parser.add_argument("line", nargs=argparse.PARSER, choices=tuple(SUBCOMMANDS), metavar="subcommand")
        parser.set_defaults(parser=parser)

    def subcommands(self) -> dict[str, tuple[str, BenchSubcommand]]:
        """Word to a line of help and the subcommand, all of them imported: for shells that complete them."""
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
        # `llmstack`'s parser names the nearest flag after a mistake; a plain one will do.
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
