"""`llmstack bench startup`: time from a server's command to its first token."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmstack_bench.commands.foreign_flags import add_foreign_arguments
from llmstack_bench.commands.values import positive_float, positive_int
from llmstack_bench.errors import BenchError
from llmstack_bench.table import report_values


class StartupBench:
    """Start-up time of any server over several starts; on Linux, its memory too.

    The command may be any shell words: a server of another project is measured in the same way.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--num-iters", type=positive_int, default=3, metavar="N", help="starts (default: 3)")
        add("--input-len", type=positive_int, default=32, metavar="N", help="tokens of the first request (default: 32)")
        add("--endpoint", default="/v1/completions", metavar="PATH", help="its route (default: /v1/completions)")
        add("--model", metavar="NAME", help="its model (default: the first that the server lists)")
        add("--health-path", default="/health", metavar="PATH", help="answers 200 once ready (default: /health)")
        add("--timeout", type=positive_float, default=600.0, metavar="S", help="for one start (default: 600)")
        add("--stop-timeout", type=positive_float, default=30.0, metavar="S", help="for its end (default: 30)")
        add("--output-json", type=Path, metavar="FILE", help="write the results to this file")
        add_foreign_arguments(parser, "startup")
        add("server_command", nargs=argparse.REMAINDER, metavar="-- COMMAND",
            help="the server's command; a free port replaces {port}, or is added as --port")  # fmt: skip

    def run(self, namespace: argparse.Namespace) -> int:
        from llmstack_bench.startup import measure_starts, start_values

        words = namespace.server_command
        namespace.server_command = words[1:] if words[:1] == ["--"] else words
        if not namespace.server_command:
            raise BenchError("give the server's command after --, such as: -- llmstack serve gpt2", exit_code=2)
        report_values(f"starts ({namespace.num_iters})", start_values(measure_starts(namespace)), namespace)
        return 0
