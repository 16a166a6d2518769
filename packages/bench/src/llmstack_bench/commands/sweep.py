"""The flags of `llmstack bench sweep`, those of `vllm bench sweep serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmstack_bench.commands.values import positive_float, positive_int


class SweepBench:
    """Starts a server with each set of flags, and measures each with each set of loads."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("kind", nargs="?", choices=("serve",), default="serve", help="what is measured: servers")
        add("--serve-cmd", required=True, metavar="LINE", help="command that starts a server")
        add("--bench-cmd", required=True, metavar="LINE", help="command that measures it, such as llmstack bench serve")
        add("--serve-params", type=Path, metavar="FILE", help="JSON: sets of flags for the server")
        add("--bench-params", type=Path, metavar="FILE", help="JSON: sets of flags for the measurement")
        add("-o", "--output-dir", type=Path, default=Path("results"), metavar="FOLDER", help="(default: results)")
        add("--num-runs", type=positive_int, default=3, metavar="N", help="measurements of each pair (default: 3)")
        add("--resume", action="store_true", help="keep the measurements that the folder has")
        add("--dry-run", action="store_true", help="print the commands alone")
        add("--health-path", default="/health", metavar="PATH", help="200 once the server is ready (default: /health)")
        add("--timeout", type=positive_float, default=600.0, metavar="S", help="for a start (default: 600)")
        add("--stop-timeout", type=positive_float, default=60.0, metavar="S", help="then it is killed (default: 60)")

    def run(self, namespace: argparse.Namespace) -> int:
        """Measures all pairs and writes `summary.json` and `summary.csv`."""
        from llmstack_bench.sweep import run_sweep

        return run_sweep(namespace)
