"""Trains the demo model: `python -m storyteller_training --text DIR --work DIR --out DIR`."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from storyteller_training.batches import DocumentEncoder, validation_rows
from storyteller_training.bpe import train_tokenizer
from storyteller_training.card import write_card
from storyteller_training.corpus import read_books, split_sections
from storyteller_training.export import export_model, round_weights
from storyteller_training.gpt2 import ModelConfig, Storyteller
from storyteller_training.loop import TrainingConfig, train
from storyteller_training.samples import draw_samples

logger = logging.getLogger("storyteller_training")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="storyteller_training", description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="folder of plain-text story books (*.txt)")
    parser.add_argument("--work", type=Path, required=True, help="folder for tokenizer, checkpoints and progress")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write at the end")
    parser.add_argument("--steps", type=int, default=TrainingConfig().num_steps)
    parser.add_argument("--decay-steps", type=int, default=TrainingConfig().num_decay_steps)
    parser.add_argument("--full-length-steps", type=int, default=TrainingConfig().num_full_length_steps)
    parser.add_argument("--seed", type=int, default=TrainingConfig().seed)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Read the books, train (or resume) and export."""
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    arguments.work.mkdir(parents=True, exist_ok=True)
    config = TrainingConfig(
        seed=arguments.seed,
        num_steps=arguments.steps,
        num_decay_steps=arguments.decay_steps,
        num_full_length_steps=arguments.full_length_steps,
    )
    model_config = ModelConfig()
    training, validation = split_sections(read_books(arguments.text))
    path = arguments.work / "tokenizer.json"
    if not path.exists():
        texts = (paragraph for section in training for paragraph in section.paragraphs)
        train_tokenizer(texts, model_config.vocab_size).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    encoder = DocumentEncoder(tokenizer)
    held_out = validation_rows(validation, encoder, model_config.num_positions)
    model = Storyteller(model_config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info("%d parameters, %d training sections, %d validation rows", num_parameters, len(training), len(held_out))
    progress = train(model, training, held_out, encoder, config, arguments.work)
    record = {"model": asdict(model_config), "training": asdict(config), "progress": asdict(progress)}
    (arguments.work / "record.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
    export_model(model, tokenizer, arguments.out)
    round_weights(model)
    samples = draw_samples(model, tokenizer, arguments.seed)
    write_card(arguments.out / "README.md", num_parameters, model_config, config, progress, samples)


if __name__ == "__main__":
    main()
