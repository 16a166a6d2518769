"""Trains the demo model: `python -m storyteller_training --text DIR --work DIR --out DIR`."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from storyteller_training.batches import DocumentEncoder, epoch_rows, validation_rows
from storyteller_training.bpe import train_tokenizer
from storyteller_training.corpus import Section, read_books, split_sections
from storyteller_training.export import export_model, load_model
from storyteller_training.gpt2 import ModelConfig, Storyteller
from storyteller_training.loop import TrainingConfig, train
from storyteller_training.subject_training import SUBJECT_TRAINING, SubjectEpochs

logger = logging.getLogger("storyteller_training")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="storyteller_training", description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="folder of plain-text story books (*.txt)")
    parser.add_argument("--work", type=Path, required=True, help="folder for tokenizer, checkpoints and progress")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write at the end")
    parser.add_argument("--start", type=Path, help="model folder to continue from, on stories about a subject")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--decay-steps", type=int)
    parser.add_argument("--full-length-steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def config_of(arguments: argparse.Namespace) -> TrainingConfig:
    """Return the configuration of the first or of the second training, changed by the command line."""
    config = SUBJECT_TRAINING if arguments.start else TrainingConfig()
    chosen = {
        "num_steps": arguments.steps,
        "num_decay_steps": arguments.decay_steps,
        "num_full_length_steps": arguments.full_length_steps,
        "seed": arguments.seed,
    }
    return replace(config, **{name: value for name, value in chosen.items() if value is not None})


def tokenizer_for(arguments: argparse.Namespace, training: list[Section]) -> Tokenizer:
    """Return the tokenizer of the model to continue from, or one trained on the text."""
    if arguments.start:
        return Tokenizer.from_file(str(arguments.start / "tokenizer.json"))
    path = arguments.work / "tokenizer.json"
    if not path.exists():
        texts = (paragraph for section in training for paragraph in section.paragraphs)
        train_tokenizer(texts, ModelConfig().vocab_size).save(str(path))
    return Tokenizer.from_file(str(path))


def main() -> None:
    """Read the books, train (or resume) and export."""
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = config_of(arguments)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(config.seed)
    arguments.work.mkdir(parents=True, exist_ok=True)
    training, validation = split_sections(read_books(arguments.text))
    tokenizer = tokenizer_for(arguments, training)
    encoder = DocumentEncoder(tokenizer)
    model = load_model(arguments.start) if arguments.start else Storyteller(ModelConfig())
    held_out = validation_rows(validation, encoder, model.config.num_positions)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info("%d parameters, %d training sections, %d validation rows", num_parameters, len(training), len(held_out))
    rows_of = SubjectEpochs(training, encoder) if arguments.start else partial(epoch_rows, training, encoder)
    progress = train(model, rows_of, held_out, config, arguments.work)
    record = {"model": asdict(model.config), "training": asdict(config), "progress": asdict(progress)}
    (arguments.work / "record.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
    export_model(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
