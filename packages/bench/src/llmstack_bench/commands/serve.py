"""The flags of `llmstack bench serve`, most of them vLLM's."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmstack_bench.commands.values import (
    dataset_name,
    image_size,
    json_object,
    key_value,
    natural_int,
    positive_float,
    positive_int,
    range_ratio,
)
from llmstack_bench.commands.vllm_flags import PUBLISHED, add_vllm_arguments, resolved
from llmstack_bench.presets import PRESETS
from llmstack_types.vocabulary import AgentProfileName, words_of

DATASETS = ("random", "shared-prefix", "pictures", "agents", "custom", "trace", "timed-trace", *PUBLISHED)

# Defaults of flags that neither the command line nor a preset sets.
DEFAULTS = {
    "dataset_name": "random",
    "num_prompts": 100,
    "random_input_len": 128,
    "random_output_len": 128,
    "random_prefix_len": 0,
    "max_concurrency": None,
    "num_warmups": 1,
    "ignore_eos": None,
    "temperature": 0.0,
}


class ServeBench:
    """Sends a load to running servers and reports their latencies and rates."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_server_arguments(parser)
        _add_workload_arguments(parser)
        _add_load_arguments(parser)
        _add_report_arguments(parser)
        add_vllm_arguments(parser)

    def run(self, namespace: argparse.Namespace) -> int:
        """Measures and reports; 1 if a server answered no request."""
        from llmstack_bench.serving import run_serve_bench

        return run_serve_bench(resolved(with_defaults(namespace)))


def with_defaults(namespace: argparse.Namespace) -> argparse.Namespace:
    """The namespace with missing values filled from the preset, then from `DEFAULTS`."""
    preset = PRESETS[namespace.preset].flags if namespace.preset else {}
    values = vars(namespace)
    given = {name: value for name, value in values.items() if value is not None}
    return argparse.Namespace(**values | DEFAULTS | preset | given)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--base-url", action="append", default=[], metavar="URL",
        help="a server, such as http://127.0.0.1:8000; several are measured alternately")  # fmt: skip
    add("--label", action="append", default=[], metavar="NAME", help="name of each --base-url in the report")
    add("--host", default="127.0.0.1", help="of the server, without --base-url (default: 127.0.0.1)")
    add("--port", type=positive_int, default=8000, help="of the server, without --base-url (default: 8000)")
    add("--endpoint", metavar="PATH",
        help="/v1/completions (the default) or /v1/chat/completions")  # fmt: skip
    add("--model", action="append", default=[], metavar="NAME",
        help="name of the model, one for all servers or one each (default: the first one listed)")  # fmt: skip
    add("--header", action="extend", nargs="*", type=key_value, default=[], metavar="KEY=VALUE",
        help="a header of every request; Authorization comes from OPENAI_API_KEY if that is set")  # fmt: skip
    add(
        "--extra-body",
        "--extra-request-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="further fields of every request",
    )
    add("--timeout", type=positive_float, default=600.0, metavar="S",
        help="a request that takes longer counts as failed (default: 600)")  # fmt: skip


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    presets = "; ".join(f"{name}: {preset.description}" for name, preset in PRESETS.items())
    add("--preset", choices=tuple(PRESETS), help=f"a named workload, which other flags may change ({presets})")
    add("--dataset-name", type=dataset_name, choices=DATASETS, metavar="NAME",
        help="random, shared-prefix, pictures, agents, custom (lines of JSON), trace, timed_trace, or a published "
        "set from a file: sharegpt, sonnet, burstgpt, spec-bench, hf (default: random)")  # fmt: skip
    add("--dataset-path", type=Path, metavar="FILE", help="the file of a data set")
    add("--num-prompts", type=positive_int, metavar="N", help="requests (default: 100)")
    add(
        "--random-input-len",
        "--random-input",
        type=natural_int,
        metavar="N",
        help="a prompt's own tokens (default: 128)",
    )
    add(
        "--random-output-len",
        "--random-output",
        type=positive_int,
        metavar="N",
        help="tokens to generate (default: 128)",
    )
    add("--random-prefix-len", type=natural_int, metavar="N",
        help="tokens of a shared prefix before them (default: 0; 256 for shared-prefix)")  # fmt: skip
    add("--random-range-ratio", type=range_ratio, default=0.0, metavar="R",
        help='lengths vary by this fraction both ways; {"input": 0.5, "output": 0} has two (default: 0)')  # fmt: skip
    add("--num-prefixes", type=positive_int, default=1, metavar="N", help="different shared prefixes (default: 1)")
    add("--num-pictures", type=positive_int, default=1, metavar="N",
        help="requests with a picture beside the streams of --dataset-name pictures (default: 1)")  # fmt: skip
    add("--picture-size", type=image_size, default=(2048, 2048), metavar="WxH",
        help="pixels of each (default: 2048x2048)")  # fmt: skip
    add("--picture-interval", type=positive_float, default=1.0, metavar="S",
        help="seconds between them, and before the first (default: 1)")  # fmt: skip
    add("--agent-profile", choices=words_of(AgentProfileName), default="steady",
        help="pauses of the sessions of --dataset-name agents (default: steady)")  # fmt: skip
    add("--agent-sessions", type=positive_int, default=20, metavar="N",
        help="sessions, without their subagents (default: 20)")  # fmt: skip
    add("--agent-gap", type=positive_float, default=30.0, metavar="S",
        help="mean seconds between the starts of two sessions (default: 30)")  # fmt: skip
    add("--trace-speed", type=positive_float, default=1.0, metavar="X", help="2 replays in half the time (default: 1)")
    add("--trace-length-scale", type=positive_float, default=1.0, metavar="X",
        help="factor for a trace's lengths (default: 1)")  # fmt: skip
    add("--prompt-format", choices=("auto", "token-ids", "text"), default="auto",
        help="how random prompts are sent (default: token ids, text to a chat route)")  # fmt: skip
    add(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json, or a folder with it, to make text of token ids",
    )
    add("--vocab-size", type=positive_int, metavar="N",
        help="upper bound of token ids (default: the model's if its folder is on this machine, else 256)")  # fmt: skip
    add("--seed", type=int, default=0, help="equal seeds give equal requests (default: 0)")
    add("--ignore-eos", action=argparse.BooleanOptionalAction,
        help="generate the full length (default: yes where prompts are random)")  # fmt: skip
    add("--disable-ignore-eos", action="store_false", dest="ignore_eos", default=None, help="as --no-ignore-eos")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: 0)")


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--request-rate", type=positive_float, metavar="R",
        help="requests per second; inf sends all at once (default: inf, or a trace's own times)")  # fmt: skip
    add("--burstiness", type=positive_float, default=1.0, metavar="B",
        help="1 is a Poisson process, below 1 sends bursts, inf sends at equal intervals (default: 1)")  # fmt: skip
    add("--max-concurrency", type=positive_int, metavar="N", help="requests in flight at most (default: no limit)")
    add("--num-warmups", "--warmup-requests", type=natural_int, metavar="N",
        help="requests before the first run that are not counted (default: 1)")  # fmt: skip
    add("--repetitions", type=positive_int, default=1, metavar="N",
        help="runs per server, alternating, each with its own prompts (default: 1)")  # fmt: skip
    add("--server-pid", action="append", type=natural_int, default=[], metavar="PID",
        help="process of each --base-url, 0 for none; suspended (SIGSTOP) while another is measured, so that "
        "an idle server that spins takes no core")  # fmt: skip
    add("--bandwidth", action="store_true", help="measure and report the machine's memory bandwidth before each run")


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("report").add_argument
    add("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="LIST",
        help="latencies to print (default: ttft,tpot,itl,e2el)")  # fmt: skip
    add("--metric-percentiles", default="50,90,99", metavar="LIST", help="(default: 50,90,99)")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS",
        help="targets such as ttft:200 tpot:50 e2el:3000; requests that meet all are counted")  # fmt: skip
    add("--output-json", type=Path, metavar="FILE", help="write the results to this file")
    add("--save-result", action="store_true", help="write the results into --result-dir, under a name with the time")
    add("--result-dir", type=Path, default=Path(), metavar="FOLDER", help="(default: the current folder)")
    add(
        "--save-detailed", "--output-details", action="store_true", help="add a record for every request to the results"
    )
    add("--plot", type=Path, action="append", default=[], metavar="FILE", help="draw the results, as .html or .png")
    add("--disable-tqdm", action="store_true", help="no progress bar")
