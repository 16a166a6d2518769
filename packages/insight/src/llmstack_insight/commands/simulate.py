"""The subcommand `llmstack simulate`.

`llmstack --help` imports it, so it imports little.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmstack_insight.commands.agents import add_agent_arguments, sessions_of
from llmstack_insight.commands.arguments import above_zero, positive
from llmstack_types.vocabulary import RoutingPolicyName, SchedulingPolicyName, words_of

if TYPE_CHECKING:
    from llmstack_insight.simulate.agent_report import AgentReport
    from llmstack_insight.simulate.report import Report
    from llmstack_insight.simulate.simulation import SimulationConfig


class SimulateCommand:
    """`llmstack simulate --trace FILE --format mooncake|azure|agents`, or `--dataset agents`."""

    name = "simulate"
    help = "run a trace of production through the scheduler and the cache, without a model"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags of `llmstack simulate`."""
        add = parser.add_argument
        add("--trace", type=Path, metavar="FILE", help="the trace")
        add("--format", choices=("mooncake", "azure", "agents"), help="whose trace it is")
        add("--limit", type=positive, metavar="N", help="only the first N requests")
        add(
            "--arrivals",
            choices=("trace", "sequential"),
            default="trace",
            help="'trace' follows its clock, 'sequential' runs one request after the other (default: trace)",
        )
        add("--num-blocks", type=positive, metavar="N", help="blocks of the KV cache (default: as many as needed)")
        add("--block-size", type=positive, default=16, metavar="B", help="tokens per block (default: 16)")
        add(
            "--ttft-target",
            type=above_zero,
            default=2.0,
            metavar="S",
            help="a request is good output if its first token comes within S seconds (default: 2)",
        )
        add(
            "--cost-model",
            type=Path,
            metavar="FILE",
            help="how long steps take: what `llmstack serve --record-steps` wrote, to be fitted; or JSON with base_s, "
            "prefill_token_s, decode_row_s and context_token_s, or with steps to fit, each of them "
            "[prefill tokens, decode rows, context tokens, seconds] (default: an 8B model on a large GPU)",
        )
        add("--replicas", type=positive, default=1, metavar="N", help="engine cores, each with a cache (default: 1)")
        add(
            "--routing",
            choices=words_of(RoutingPolicyName),
            default="exact",
            help="how one of several is chosen; they are compared with one cache as large as all together and with "
            "round robin, which takes as long again (default: exact)",
        )
        add(
            "--load",
            type=above_zero,
            metavar="F",
            help="move the arrivals so that they take this share of the capacity, such as 0.8; takes a second run",
        )
        add("--predict", action="store_true", help="predict the first token of each request, and compare")
        add("--json", action="store_true", help="print one JSON object")
        add_agent_arguments(parser)
        _add_scheduler_arguments(parser)

    def run(self, namespace: argparse.Namespace) -> int:
        """Simulates and prints what was found; 1 with one line if it cannot."""
        from llmstack_engine_client.prediction.errors import SimulationError

        try:
            report = _simulated(namespace)
        except SimulationError as error:
            sys.stderr.write(f"llmstack simulate: error: {error}\n")
            return 1
        sys.stdout.write((json.dumps(report.to_json(), indent=2) if namespace.json else report.to_text()) + "\n")
        return 0


def _simulated(namespace: argparse.Namespace) -> AgentReport | Report:
    """Raises SimulationError: a flag or a file is wrong, or the scheduler makes no progress."""
    from llmstack_engine_client.prediction.cost_model import LinearCostModel
    from llmstack_engine_client.prediction.errors import SimulationError
    from llmstack_insight.simulate.agents import simulate_agents
    from llmstack_insight.simulate.calibration import load_cost_model
    from llmstack_insight.simulate.replicas import simulate_replicas
    from llmstack_insight.simulate.traces import TraceFormat, read_trace

    is_file = namespace.trace is not None and namespace.format is not None and namespace.dataset is None
    if not is_file and (namespace.dataset is None or namespace.trace is not None or namespace.format is not None):
        raise SimulationError("give --trace FILE and --format, or --dataset agents")
    cost_model = LinearCostModel() if namespace.cost_model is None else load_cost_model(namespace.cost_model)
    sessions = sessions_of(namespace)
    if sessions is not None:
        return simulate_agents(sessions, _config(namespace), cost_model, namespace.memory_share)
    trace = read_trace(namespace.trace, TraceFormat(namespace.format), namespace.limit)
    return simulate_replicas(trace, _config(namespace), cost_model)


def _add_scheduler_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("scheduler").add_argument
    add("--max-num-seqs", type=positive, default=256, metavar="N", help="requests per step at most (default: 256)")
    add("--max-num-batched-tokens", type=positive, default=2048, metavar="N",
        help="tokens per step at most (default: 2048)")  # fmt: skip
    add(
        "--scheduling-policy",
        choices=words_of(SchedulingPolicyName),
        default="fcfs",
        help="order of requests (default: fcfs)",
    )
    add("--long-prefill-token-threshold", type=int, default=0, metavar="N",
        help="tokens of one request per step at most; 0 is no limit (default: 0)")  # fmt: skip
    add("--max-prefill-tokens", type=int, default=0, metavar="N",
        help="prompt tokens of several requests per step at most; 0 is no limit (default: 0)")  # fmt: skip
    add(
        "--max-num-partial-prefills",
        type=int,
        default=0,
        metavar="N",
        help="requests in the midst of their prompts at most; 0 is no limit (default: 0)",
    )
    add("--shorter-prompts-first", action=argparse.BooleanOptionalAction, default=False,
        help="let shorter prompts go before long ones, which keep a quarter of the prompts' tokens")  # fmt: skip
    add("--session-eviction", action=argparse.BooleanOptionalAction, default=False,
        help="evict first what sessions want last, in place of the least recently used")  # fmt: skip
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="reuse equal prefixes")


def _config(namespace: argparse.Namespace) -> SimulationConfig:
    from llmstack_core_scheduler import SchedulerConfig
    from llmstack_engine_client.prediction.errors import SimulationError
    from llmstack_engine_client.routing import RoutingPolicy
    from llmstack_insight.simulate.simulation import Arrivals, SimulationConfig

    try:
        scheduler = SchedulerConfig(
            max_num_seqs=namespace.max_num_seqs,
            max_num_batched_tokens=namespace.max_num_batched_tokens,
            policy=namespace.scheduling_policy,
            long_prefill_token_threshold=namespace.long_prefill_token_threshold,
            max_prefill_tokens=namespace.max_prefill_tokens,
            max_num_partial_prefills=namespace.max_num_partial_prefills,
            shorter_prompts_first=namespace.shorter_prompts_first,
        )
    except ValueError as error:
        raise SimulationError(str(error)) from error
    return SimulationConfig(
        scheduler,
        namespace.num_blocks,
        namespace.block_size,
        namespace.enable_prefix_caching,
        Arrivals(namespace.arrivals),
        namespace.ttft_target,
        namespace.replicas,
        RoutingPolicy(namespace.routing),
        namespace.load,
        namespace.predict,
        namespace.session_eviction,
    )
