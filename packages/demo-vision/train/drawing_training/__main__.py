"""Trains the model: `python -m drawing_training --work DIR --out DIR`."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from drawing_training.batches import Batches
from drawing_training.export import export_model
from drawing_training.loop import Trained, TrainingConfig, train
from drawing_training.network import ModelConfig, Seer
from drawing_training.tokens import train_tokenizer

logger = logging.getLogger("drawing_training")


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="drawing_training", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for tokenizer, checkpoint and progress")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write at the end")
    parser.add_argument("--steps", type=int, help="default: %(default)s", default=TrainingConfig().num_steps)
    parser.add_argument("--decay-steps", type=int, default=TrainingConfig().num_decay_steps)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Trains, or goes on with what was stopped, and exports."""
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = replace(TrainingConfig(), num_steps=arguments.steps, num_decay_steps=arguments.decay_steps)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(config.seed)
    arguments.work.mkdir(parents=True, exist_ok=True)
    path = arguments.work / "tokenizer.json"
    if not path.exists():
        train_tokenizer(config.seed).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    seer = Seer(ModelConfig())
    logger.info("%d parameters", sum(parameter.numel() for parameter in seer.parameters()))
    batches = Batches(tokenizer, seer.config, config.seed, config.num_rows)
    progress = train(Trained(seer), batches, config, arguments.work)
    record = {"model": asdict(seer.config), "training": asdict(config), "progress": asdict(progress)}
    (arguments.work / "record.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
    export_model(seer, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
