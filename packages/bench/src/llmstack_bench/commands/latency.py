"""`llmstack bench latency`: one batch again and again through `LLM`."""

from __future__ import annotations

import argparse

from llmstack_bench.commands.offline_flags import add_offline_arguments, report
from llmstack_bench.commands.values import natural_int, positive_int


class LatencyBench:
    """How long one batch takes on a warm engine."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags."""
        add_offline_arguments(parser, input_len=32, output_len=128)
        parser.add_argument("--batch-size", type=positive_int, default=8, metavar="N", help="requests (default: 8)")
        parser.add_argument("--num-iters", type=positive_int, default=10, metavar="N", help="batches to measure (10)")
        parser.add_argument("--num-iters-warmup", type=natural_int, default=2, metavar="N", help="batches before (2)")

    def run(self, namespace: argparse.Namespace) -> int:
        """Measures and reports."""
        from llmstack_bench.offline import measure_latency

        report("latency of a batch", measure_latency(namespace), namespace)
        return 0
