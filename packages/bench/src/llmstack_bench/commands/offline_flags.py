"""What `bench throughput` and `bench latency` share: flags, and how they report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmstack_bench.commands.values import natural_int, positive_int
from llmstack_bench.errors import BenchError
from llmstack_bench.table import format_number, format_table

_UNITS = {"s": "s", "ms": "ms", "mib": "MiB"}


def add_offline_arguments(parser: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    """Declares the engine's flags, the lengths and the report's."""
    add = parser.add_argument_group("engine").add_argument
    add("--model", required=True, metavar="MODEL", help="a folder, or a repository id")
    add("--tokenizer", metavar="PATH", help="where it is not the model's own")
    add("--dtype", default="auto", help="(default: auto, the checkpoint's)")
    add("--load-format", default="auto", help="'dummy' makes random weights, which are as fast (default: auto)")
    add("--max-model-len", type=positive_int, metavar="N", help="(default: what the checkpoint was made for)")
    add("--engine-option", action="append", type=engine_option, default=[], metavar="NAME=VALUE",
        help="any other option of LLM, such as max_num_seqs=32")  # fmt: skip
    add = parser.add_argument_group("workload").add_argument
    add("--input-len", type=natural_int, default=input_len, metavar="N", help=f"a prompt's own tokens ({input_len})")
    add("--output-len", type=positive_int, default=output_len, metavar="N", help=f"tokens to generate ({output_len})")
    add("--prefix-len", type=natural_int, default=0, metavar="N", help="tokens in front that all prompts share (0)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--seed", type=int, default=0, help="equal seeds compute equal prompts (default: 0)")
    add = parser.add_argument_group("report").add_argument
    add("--output-json", type=Path, metavar="FILE", help="write the results there")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def engine_option(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, the value as JSON where it is JSON, else as text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def report(title: str, values: Mapping[str, float], options: argparse.Namespace) -> None:
    """Prints a table, and writes JSON where it was asked for."""
    rows = [[_title(name), format_number(value)] for name, value in values.items()]
    sys.stdout.write(format_table([title, ""], rows) + "\n")
    if options.output_json is None:
        return
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    try:
        options.output_json.write_text(json.dumps({"format": 1, "settings": settings, "results": values}, indent=2))
    except OSError as error:
        raise BenchError(f"--output-json {options.output_json}: {error.strerror}") from error


def _title(name: str) -> str:
    """`median_ready_s` becomes `median ready (s)`."""
    words, _, unit = name.rpartition("_")
    shown = _UNITS.get(unit)
    return name.replace("_", " ") if shown is None else f"{words.replace('_', ' ')} ({shown})"
