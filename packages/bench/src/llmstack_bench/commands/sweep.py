"""The flags of `llmstack bench sweep`, those of `vllm bench sweep serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmstack_bench.commands.foreign_flags import add_foreign_arguments
from llmstack_bench.commands.values import natural_int, positive_float, positive_int

_OTHER_KINDS = {
    "serve_workload": "give the request rates or concurrencies in --bench-params of sweep serve",
    "startup": "use llmstack bench startup, once for each command",
    "plot": "results are JSON and CSV; --plot of llmstack bench serve draws one measurement",
    "plot_pareto": "results are JSON and CSV; --plot of llmstack bench serve draws one measurement",
}


class SweepBench:
    """Starts a server with each set of flags, and measures each with each set of loads."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("kind", nargs="?", type=sweep_kind, default="serve", metavar="serve", help="what is measured: servers")
        add("--serve-cmd", required=True, metavar="LINE", help="command that starts a server")
        add("--bench-cmd", required=True, metavar="LINE", help="command that measures it, such as llmstack bench serve")
        add("--serve-params", type=Path, metavar="FILE", help="JSON: sets of flags for the server")
        add("--bench-params", type=Path, metavar="FILE", help="JSON: sets of flags for the measurement")
        add("-o", "--output-dir", type=Path, default=Path("results"), metavar="FOLDER", help="(default: results)")
        add("--num-runs", type=positive_int, default=3, metavar="N", help="measurements of each pair (default: 3)")
        add("-e", "--experiment-name", default="", metavar="NAME", help="a folder of this name in --output-dir")
        add("--link-vars", type=links, default=[], metavar="A=B,...",
            help="measure only pairs whose flag A of the server equals flag B of the measurement")  # fmt: skip
        add("--warmup-num-prompts", type=natural_int, default=0, metavar="N",
            help="prompts of a measurement before the first that is not counted (default: 0)")  # fmt: skip
        add("--after-bench-cmd", metavar="LINE", help="command to run after each measurement")
        add("--continue-on-error", action="store_true", help="go on where a server or a measurement fails")
        add("--resume", action="store_true", help="keep the measurements that the folder has")
        add("--dry-run", action="store_true", help="print the commands alone")
        add("--health-path", default="/health", metavar="PATH", help="200 once the server is ready (default: /health)")
        add(
            "--timeout",
            "--server-ready-timeout",
            type=positive_float,
            default=600.0,
            metavar="S",
            help="for a start (default: 600)",
        )
        add("--stop-timeout", type=positive_float, default=60.0, metavar="S", help="then it is killed (default: 60)")
        add_foreign_arguments(parser, "sweep")

    def run(self, namespace: argparse.Namespace) -> int:
        """Measures all pairs and writes `summary.json` and `summary.csv`."""
        from llmstack_bench.sweep import run_sweep

        return run_sweep(namespace)


def sweep_kind(text: str) -> str:
    """`serve`; the other kinds of vLLM are refused with what does it here."""
    if text != "serve":
        raise argparse.ArgumentTypeError(f"'{text}': {_OTHER_KINDS.get(text, 'only serve is known')}")
    return text


def links(text: str) -> list[tuple[str, str]]:
    """Pairs of a server's and a measurement's flag, from `A=B,C=D`."""
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if not all(equals and ours and theirs for ours, equals, theirs in pairs):
        raise argparse.ArgumentTypeError(f"'{text}' is not A=B,C=D")
    return [(ours.strip(), theirs.strip()) for ours, _, theirs in pairs]
