"""The subcommand `llmstack collect-env`; light, since `llmstack --help` imports it."""

from __future__ import annotations

import argparse
import json


class CollectEnvCommand:
    """`llmstack collect-env`."""

    name = "collect-env"
    help = "describe this machine and what is installed on it, for a report of a fault"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flag."""
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, namespace: argparse.Namespace) -> int:
        """Prints the report; what cannot be found out is left out or says why."""
        from llmstack_command.collect_env.report import collect, render

        sections = collect()
        print(json.dumps(sections, indent=2) if namespace.json else render(sections))
        return 0
