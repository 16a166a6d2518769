"""Writes the model card from the record of a training run and samples of its final weights."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from storyteller_training.card_text import DATA, FORM, INTRODUCTION, METHOD, REPRODUCTION
from storyteller_training.gpt2 import ModelConfig
from storyteller_training.loop import Progress, TrainingConfig
from storyteller_training.samples import Sample


def write_card(
    path: Path, num_parameters: int, config: ModelConfig, training: TrainingConfig, run: Progress, samples: list[Sample]
) -> None:
    """Write the card as Markdown."""
    introduction = INTRODUCTION.format(
        num_parameters=num_parameters, vocab_size=config.vocab_size, num_positions=config.num_positions
    )
    parts = [introduction, FORM, DATA, training_section(config, training, run), samples_section(samples)]
    path.write_text("\n".join(parts), encoding="utf-8")


def training_section(config: ModelConfig, training: TrainingConfig, run: Progress) -> str:
    """Return sizes, hyperparameters and losses."""
    hyperparameters = {**asdict(config), **asdict(training)}
    results = {
        "tokens seen": f"{run.num_tokens:,}",
        "training loss (mean of the last steps)": f"{run.train_loss:.3f} nats a token",
        "validation loss (held-out running text and answers)": f"{run.val_loss:.3f} nats a token",
        "wall-clock time, the machine shared with other work": f"{run.wall_s / 60:.0f} minutes on 2 CPU cores",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }
    method = METHOD.format(short_length=training.short_length, num_positions=config.num_positions)
    tables = [table("hyperparameter", hyperparameters), method, table("result", results), REPRODUCTION]
    return "## Training\n\n" + "\n".join(tables)


def table(title: str, rows: Mapping[str, object]) -> str:
    """Return a Markdown table of names and values."""
    lines = [f"| {title} | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""]
    return "\n".join(lines)


def samples_section(samples: list[Sample]) -> str:
    """Return the samples as they came."""
    parts = [
        "## Samples",
        "",
        "Unedited, the first draw of each, with the defaults above, from these weights; at most 160 tokens.",
    ]
    for sample in samples:
        quoted = "\n".join(f"> {line}".rstrip() for line in sample.text.split("\n"))
        parts += ["", f"**{sample.kind}**: `{sample.prompt}`", "", quoted]
    return "\n".join([*parts, ""])
