"""Writes the model card: from the records of both runs."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from storyteller_training.card_text import (
    DATA,
    FIRST_RUN,
    FORM,
    INTRODUCTION,
    METHOD,
    REPRODUCTION,
    SECOND_RUN,
    SUBJECTS,
)
from storyteller_training.export import load_model
from storyteller_training.samples import Sample, draw_samples


def write_card(folder: Path, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Write the card of a model folder as Markdown, with samples of the weights in it."""
    model = load_model(folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    sizes = second["model"]
    share = f"{second['rates']['asked']:.0%}"
    introduction = INTRODUCTION.format(num_parameters=num_parameters, **sizes, share=share)
    samples = draw_samples(model, Tokenizer.from_file(str(folder / "tokenizer.json")), second["training"]["seed"])
    subjects = subjects_section(first["rates"], second["rates"])
    parts = [introduction, subjects, FORM, DATA, training_section(first, second), samples_section(samples)]
    (folder / "README.md").write_text("\n".join(parts), encoding="utf-8")


def subjects_section(before: Mapping[str, Any], rates: Mapping[str, Any]) -> str:
    """Return how often a story is about the subject that was asked for."""
    rows = {
        'asked: "Tell me a story about a badger."': f"**{rates['asked']:.1%}**",
        'not asked: "Tell me a story."': f"{rates['not_asked']:.1%}",
        f"asked, after the first training only (answers to each: {before['draws']})": f"{before['asked']:.1%}",
        "those of the stories that name it which name it in a later sentence too": f"{rates['again']:.1%}",
        f"answers that end by themselves within {rates['max_tokens']} tokens": f"{rates['ended']:.1%}",
    }
    return SUBJECTS.format(**rates) + "\n" + table("the subject is named in the first three sentences", rows)


def training_section(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Return sizes, hyperparameters and losses of both runs."""
    parts = [
        "## Training\n",
        table("network", second["model"]),
        METHOD,
        "### First run: from random weights\n",
        *(table("hyperparameter", first["training"]), FIRST_RUN, table("result", results_of(first["progress"]))),
        "### Second run: stories about a subject\n",
        *(table("hyperparameter", second["training"]), SECOND_RUN, table("result", results_of(second["progress"]))),
        f"Python {platform.python_version()}, torch {torch.__version__}. {REPRODUCTION}",
    ]
    return "\n".join(parts)


def results_of(run: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run came to."""
    return {
        "tokens seen": f"{run['num_tokens']:,}",
        "training loss (mean of the last steps)": f"{run['train_loss']:.3f} nats a token",
        "validation loss (held-out running text and answers)": f"{run['val_loss']:.3f} nats a token",
        "wall-clock time, the machine shared with other work": f"{run['wall_s'] / 60:.0f} minutes",
    }


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


def main() -> None:
    """Write the card of a model folder from the `record.json` and `rates.json` of both runs."""
    parser = argparse.ArgumentParser(prog="storyteller_training.card", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model folder, whose README.md is written")
    parser.add_argument("--first", type=Path, required=True, help="working folder of the first run")
    parser.add_argument("--second", type=Path, required=True, help="working folder of the second run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    write_card(arguments.model, read_run(arguments.first), read_run(arguments.second))


def read_run(folder: Path) -> dict[str, Any]:
    """Return the record of a training run, with its rates under `rates`."""
    record: dict[str, Any] = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    record["rates"] = json.loads((folder / "rates.json").read_text(encoding="utf-8"))
    return record


if __name__ == "__main__":
    main()
