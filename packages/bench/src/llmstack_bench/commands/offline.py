"""`llmstack bench throughput` and `latency`: `LLM` without a server."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmstack_bench.commands.foreign_flags import add_foreign_arguments
from llmstack_bench.commands.values import dataset_name, natural_int, positive_int, range_ratio
from llmstack_bench.commands.vllm_flags import PUBLISHED, add_dataset_arguments
from llmstack_bench.table import report_values


class ThroughputBench:
    """Tokens per second for a load that is submitted at once."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_offline_arguments(parser, input_len=128, output_len=128)
        _add_workload_arguments(parser)
        parser.add_argument("--num-prompts", type=positive_int, default=64, metavar="N", help="(default: 64)")
        parser.add_argument("--num-iters", type=positive_int, default=1, metavar="N", help="loads to measure (1)")
        parser.add_argument(
            "--num-iters-warmup", type=natural_int, default=1, metavar="N", help="small ones before (1)"
        )
        parser.add_argument(
            "--num-warmups", type=positive_int, metavar="N", help="requests of each of them (at most 8)"
        )
        add_foreign_arguments(parser, "throughput")

    def run(self, namespace: argparse.Namespace) -> int:
        from llmstack_bench.offline import measure_throughput

        report_values("throughput", measure_throughput(_with_engine_options(namespace)), namespace)
        return 0


class LatencyBench:
    """Duration of one batch on a warm engine."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_offline_arguments(parser, input_len=32, output_len=128)
        parser.add_argument("--batch-size", type=positive_int, default=8, metavar="N", help="requests (default: 8)")
        parser.add_argument("--num-iters", type=positive_int, default=10, metavar="N", help="batches to measure (10)")
        parser.add_argument("--num-iters-warmup", type=natural_int, default=2, metavar="N", help="batches before (2)")
        parser.add_argument("--use-beam-search", action="store_true", help="--n is then the number of beams")

    def run(self, namespace: argparse.Namespace) -> int:
        from llmstack_bench.offline import measure_latency

        report_values("latency of a batch", measure_latency(_with_engine_options(namespace)), namespace)
        return 0


def add_offline_arguments(parser: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    """Declares the flags of the engine, the workload and the report."""
    add = parser.add_argument_group("engine").add_argument
    add("--model", required=True, metavar="MODEL", help="a folder, or a repository id")
    add("--tokenizer", metavar="PATH", help="if it is not the model's own")
    add("--dtype", default="auto", help="(default: auto, the checkpoint's)")
    add("--load-format", default="auto", help="'dummy' makes random weights, with the same speed (default: auto)")
    add("--max-model-len", type=positive_int, metavar="N", help="(default: the checkpoint's)")
    add("--engine-option", action="append", type=engine_option, default=[], metavar="NAME=VALUE",
        help="any other option of LLM, such as max_num_seqs=32")  # fmt: skip
    _add_engine_options(parser)
    add = parser.add_argument_group("workload").add_argument
    add("--n", type=positive_int, default=1, metavar="N", help="completions of each prompt (default: 1)")
    add("--disable-detokenize", action="store_true", help="no text is made of the tokens")
    add("--profile", action="store_true", help="record a profile; needs --engine-option profiler_config=...")
    add(
        "--input-len",
        "--random-input-len",
        type=natural_int,
        default=input_len,
        metavar="N",
        help=f"a prompt's own tokens ({input_len})",
    )
    add(
        "--output-len",
        "--random-output-len",
        type=positive_int,
        default=output_len,
        metavar="N",
        help=f"tokens to generate ({output_len})",
    )
    add(
        "--prefix-len",
        "--random-prefix-len",
        type=natural_int,
        default=0,
        metavar="N",
        help="tokens of a prefix that all prompts share (0)",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--seed", type=int, default=0, help="equal seeds give equal prompts (default: 0)")
    add = parser.add_argument_group("report").add_argument
    add("--output-json", type=Path, metavar="FILE", help="write the results to this file")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `vllm bench throughput` about what is sent."""
    add_dataset_arguments(parser)
    add = parser.add_argument_group("workload, as in vllm bench throughput").add_argument
    add("--backend", choices=("vllm", "llmstack"), default="llmstack", metavar="NAME", help="this engine, by any name")
    add("--dataset-name", type=dataset_name, choices=("random", *PUBLISHED), default="random", metavar="NAME",
        help=f"random, {', '.join(PUBLISHED)} (default: random)")  # fmt: skip
    add("--dataset-path", type=Path, metavar="FILE", help="the file of a data set")
    add("--random-range-ratio", type=range_ratio, default=0.0, metavar="R", help="lengths vary by this fraction (0)")


# Options of LLM that have flags here. What each is, its declaration in `llmstack_llm` says.
ENGINE_FLAGS = (
    "--block-size", "--data-parallel-size", "--device", "--gpu-memory-utilization", "--hf-overrides",
    "--kv-cache-dtype", "--kv-cache-memory-bytes", "--max-num-batched-tokens", "--max-num-seqs", "--num-kv-blocks",
    "--pipeline-parallel-size", "--quantization", "--revision", "--speculative-config", "--swap-space",
    "--tensor-parallel-size", "--async-scheduling", "--enable-chunked-prefill", "--enable-expert-parallel",
    "--enable-prefix-caching", "--enforce-eager", "--skip-tokenizer-init", "--trust-remote-code",
)  # fmt: skip


def _declared_options() -> Sequence[Any]:
    """The options of these flags, as `llmstack_llm` declares them; none where it is not installed."""
    try:
        args = importlib.import_module("llmstack_llm.engine_args").EngineArgs
    except ModuleNotFoundError:
        return ()
    options = importlib.import_module("llmstack_llm.options.option").options_of(args)
    return [option for option in options if option.declared.flag in ENGINE_FLAGS]


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine, as in vllm bench").add_argument
    for option in _declared_options():
        text = option.declared.help.replace("%", "%%")
        if option.is_switch:
            add(*option.flags, dest=option.name, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            add(*option.flags, dest=option.name, type=partial(_value_of, option), metavar="X", help=text)


def _value_of(option: Any, text: str) -> Any:
    """The value of an option that a text stands for."""
    try:
        return option.from_text(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _with_engine_options(namespace: argparse.Namespace) -> argparse.Namespace:
    """The namespace with the flags of the engine among the values of `--engine-option`, which win."""
    given = [(option.name, getattr(namespace, option.name, None)) for option in _declared_options()]
    given = [(name, value) for name, value in given if value is not None]
    named = getattr(namespace, "engine_option", [])
    return argparse.Namespace(**vars(namespace) | {"engine_option": [*given, *named]})


def engine_option(text: str) -> tuple[str, Any]:
    """Parses `NAME=VALUE`; the value is JSON if it can be parsed as JSON, else text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
