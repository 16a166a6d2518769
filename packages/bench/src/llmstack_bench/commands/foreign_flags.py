"""Flags of vLLM's commands that have no effect here, or are refused with a reason."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

# What a flag without effect takes in vLLM; all others are switches.
_WITH_VALUE = frozenset({"--hf-name", "--tokenizer-mode"})


@cache
def vllm_flags() -> dict[str, Any]:
    """The flags that vLLM's benchmark commands publish, by command, with what becomes of those that are not done."""
    text = resources.files(__package__).joinpath("vllm_bench_flags.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def add_foreign_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Declares the flags that the table names without effect or as refused."""
    table = vllm_flags()[command]
    add = parser.add_argument_group("of vLLM, without effect here").add_argument
    for flag, reason in table["no_effect"].items():
        add(flag, action=_NoEffect, nargs=1 if flag in _WITH_VALUE else 0, metavar="X", help=reason)
    for flag, reason in table["refused"].items():
        parser.add_argument(flag, action=_Refused, nargs="*", help=argparse.SUPPRESS, reason=reason)


def refused_value(flag: str, name: str) -> str | None:
    """Why a value that vLLM publishes for a flag of `serve` is refused; None where it is not."""
    reason: str | None = vllm_flags()["serve"]["refused_values"][flag].get(name)
    return reason


class _NoEffect(argparse.Action):
    """Says in one line why the flag changes nothing."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, **options | {"default": argparse.SUPPRESS})

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        sys.stderr.write(f"{option}: no effect: {self.help}\n")


class _Refused(argparse.Action):
    """Ends the line with the reason."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, reason: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, **options | {"default": argparse.SUPPRESS})
        self.reason = reason

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        raise argparse.ArgumentError(self, self.reason)
