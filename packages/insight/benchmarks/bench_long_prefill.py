"""First tokens of prompts of 1k tokens beside one of 128k, with and without it, and the tokens per second of all.

    python packages/insight/benchmarks/bench_long_prefill.py
    python packages/insight/benchmarks/bench_long_prefill.py --short-prompts 300 --tokens 1024 --budget 2048

The real scheduler and cache run on a virtual clock, under the cost model that `llmstack simulate` has by default. So
the figures are the same on every machine, and the run takes some seconds. Prompts come evenly, by chance, or all at
once. The rates of the tokens are those of the load with the long prompt, each relative to the default scheduler.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping
from typing import Any

from llmstack_core_scheduler import SchedulerConfig
from llmstack_insight.simulate import Report, SimulationConfig, TraceRequest, simulate

NUM_LONG_TOKENS = 131_072
NUM_OUTPUT_TOKENS = 16
LONG_ARRIVAL_S = 10.0
PIECE = 512  # tokens that a trace names by one number
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "--long-prefill-token-threshold 1024": {"long_prefill_token_threshold": 1024},
    "--shorter-prompts-first": {"shorter_prompts_first": True},
}
LOADS = {"5 a second": 5.0, "12 a second": 12.0, "18 a second": 18.0, "5 a second, by chance": 5.0, "all at once": 0.0}


def arrivals(load: str, num_requests: int) -> Iterator[float]:
    """When the short prompts come."""
    rate, pick, now_s = LOADS[load], random.Random(1), 0.0
    for _ in range(num_requests):
        yield now_s
        if rate:
            now_s += pick.expovariate(rate) if "chance" in load else 1 / rate


def trace(load: str, num_requests: int, num_tokens: int, *, has_long: bool) -> list[TraceRequest]:
    """Short prompts that share nothing, and a long one."""
    num_pieces, requests = -(-num_tokens // PIECE), []
    for place, arrival_s in enumerate(arrivals(load, num_requests)):
        pieces = tuple(range(place * num_pieces, (place + 1) * num_pieces))
        requests.append(TraceRequest(arrival_s, num_tokens, NUM_OUTPUT_TOKENS, pieces))
    if has_long:
        first = num_requests * num_pieces
        pieces = tuple(range(first, first + NUM_LONG_TOKENS // PIECE))
        arrival_s = LONG_ARRIVAL_S if LOADS[load] else 0.0
        requests.append(TraceRequest(arrival_s, NUM_LONG_TOKENS, NUM_OUTPUT_TOKENS, pieces))
    return sorted(requests, key=lambda request: request.arrival_s)


def p99_of_short(report: Report, *, has_long: bool) -> float:
    """The p99 by nearest rank; the long prompt's own first token, the last but for chance, does not count."""
    ordered = sorted(report.ttft_s)[: len(report.ttft_s) - has_long]
    return ordered[-(-len(ordered) * 99 // 100) - 1]


def main() -> None:
    """Prints a line for each load and setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short-prompts", type=int, default=300, help="how many of them (default: 300)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each (default: 1024)")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step (default: 2048)")
    arguments = parser.parse_args()
    print("| load | setting | p99 without | p99 with | ratio | last first token | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for load in LOADS:
        default_rate = 0.0
        for name, changes in SETTINGS.items():
            config = SimulationConfig(SchedulerConfig(max_num_batched_tokens=arguments.budget, **changes))
            reports = [
                simulate(trace(load, arguments.short_prompts, arguments.tokens, has_long=has_long), config)
                for has_long in (False, True)
            ]
            without, beside = (p99_of_short(report, has_long=place == 1) for place, report in enumerate(reports))
            rate = (reports[1].num_prompt_tokens + reports[1].num_output_tokens) / reports[1].simulated_s
            default_rate = default_rate or rate
            print(
                f"| {load} | {name} | {without:.3f} s | {beside:.3f} s | {beside / without:.2f} "
                f"| {max(reports[1].ttft_s):.2f} s | {rate / default_rate:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
