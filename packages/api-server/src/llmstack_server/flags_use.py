"""The flags of `llmstack serve` that say what a model is for; the standard library only, since `--help` loads it."""

from __future__ import annotations

import argparse

from llmstack_server.flag_types import json_object

TASKS = ("auto", "generate", "embed", "embedding", "classify", "score")
CONVERSIONS = ("auto", "none", "embed", "classify")


def add_use_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares them."""
    add = parser.add_argument_group("use of the model").add_argument
    add(
        "--runner",
        default="auto",
        help="'generate' or 'pooling' leaves the other away, 'auto' offers all that the model can (default: auto)",
    )
    add(
        "--task",
        choices=TASKS,
        default="auto",
        help="older name of --runner; 'classify' and 'score' ask for a model with labels (default: auto)",
    )
    add(
        "--convert",
        choices=CONVERSIONS,
        default="auto",
        help="'none' keeps a model that generates from pooling as well (default: auto)",
    )
    add(
        "--pooler-config",
        type=json_object,
        metavar="JSON",
        help="how vectors are pooled by default, such as "
        '{"pooling_type": "MEAN", "normalize": true} (default: as the model says)',
    )
