"""`llmstack bench throughput`: many requests at once through `LLM`."""

from __future__ import annotations

import argparse

from llmstack_bench.commands.offline_flags import add_offline_arguments, report
from llmstack_bench.commands.values import natural_int, positive_int


class ThroughputBench:
    """How many tokens per second the engine makes of a load that is there from the start."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags."""
        add_offline_arguments(parser, input_len=128, output_len=128)
        parser.add_argument("--num-prompts", type=positive_int, default=64, metavar="N", help="(default: 64)")
        parser.add_argument("--num-iters", type=positive_int, default=1, metavar="N", help="loads to measure (1)")
        parser.add_argument(
            "--num-iters-warmup", type=natural_int, default=1, metavar="N", help="small ones before (1)"
        )

    def run(self, namespace: argparse.Namespace) -> int:
        """Measures and reports."""
        from llmstack_bench.offline import measure_throughput

        report("throughput", measure_throughput(namespace), namespace)
        return 0
