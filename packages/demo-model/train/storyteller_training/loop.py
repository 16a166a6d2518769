"""The training loop: AdamW under a warm-up, stable, decay schedule, resumable from its last checkpoint."""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from storyteller_training.batches import EMPHASIZED, IGNORED, Row, as_tensors
from storyteller_training.gpt2 import Storyteller

logger = logging.getLogger(__name__)
EMPHASIS = 3.0
EpochRows = Callable[[int, int], list[Row]]
"""Returns the rows of one epoch: of how many tokens, and drawn with which seed."""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How the network is trained."""

    seed: int = 20
    num_steps: int = 5000
    num_decay_steps: int = 1400
    num_warmup_steps: int = 150
    # Attention over 512 positions is a third of a step on a CPU, so only the last steps train on rows of full length.
    short_length: int = 256
    full_length: int = 512
    num_full_length_steps: int = 400
    num_batch_tokens: int = 2048
    # Dropout costs a tenth of a step; the run that made the weights went without it between these steps, until its
    # validation loss fell behind the training loss by a third of a nat.
    dropout_pause: tuple[int, int] = (1000, 2400)
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    log_every: int = 100
    save_every: int = 200


@dataclass(slots=True)
class Progress:
    """What a run has done so far; kept beside the checkpoint and in the model card."""

    step: int = 0
    num_tokens: int = 0
    wall_s: float = 0.0
    train_loss: float = math.nan
    val_loss: float = math.nan


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of a step: linear warm-up, a plateau, then 1 - sqrt decay to zero."""
    if step < config.num_warmup_steps:
        return config.learning_rate * (step + 1) / config.num_warmup_steps
    decay_start = config.num_steps - config.num_decay_steps
    if step < decay_start:
        return config.learning_rate
    return config.learning_rate * (1 - math.sqrt((step - decay_start) / config.num_decay_steps))


def batches_from(rows_of: EpochRows, length: int, first_epoch: int, config: TrainingConfig) -> Iterator[list[Row]]:
    """Yield batches of rows of `length` tokens for ever, each epoch in a new arrangement."""
    batch_size = config.num_batch_tokens // length
    for epoch in itertools.count(first_epoch):
        rows = rows_of(length, config.seed * 1000 + epoch)
        logger.info("epoch %d: %d rows of %d tokens", epoch, len(rows), length)
        for at in range(0, len(rows) - batch_size + 1, batch_size):
            yield rows[at : at + batch_size]


def scheduled_batches(rows_of: EpochRows, config: TrainingConfig, first_step: int) -> Iterator[list[Row]]:
    """Yield the batches of the steps from `first_step` on: short rows, and at the end of the training full ones."""
    num_short = config.num_steps - config.num_full_length_steps
    if first_step < num_short:
        short = batches_from(rows_of, config.short_length, 0, config)
        yield from itertools.islice(short, first_step, num_short)
    full = batches_from(rows_of, config.full_length, 500, config)
    yield from itertools.islice(full, max(first_step - num_short, 0), None)


def loss_of(model: Storyteller, rows: list[Row], first_position: int = 0) -> torch.Tensor:
    """Return the mean cross-entropy of the rows' targets, in nats; emphasized targets count several times."""
    inputs, targets = as_tensors(rows)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs, first_position)
    is_target = targets != IGNORED
    chosen = targets[is_target]
    weights = torch.where(chosen >= EMPHASIZED, EMPHASIS, 1.0)
    losses = functional.cross_entropy(logits[is_target].float(), chosen % EMPHASIZED, reduction="none")
    return (losses * weights).sum() / weights.sum()


def validation_loss(model: Storyteller, rows: list[Row]) -> float:
    """Return the mean loss over validation rows, with dropout off."""
    model.eval()
    with torch.no_grad():
        losses = [float(loss_of(model, rows[at : at + 4])) for at in range(0, len(rows), 4)]
    return sum(losses) / len(losses)


def make_optimizer(model: Storyteller, config: TrainingConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=True)


def save_checkpoint(folder: Path, model: Storyteller, optimizer: torch.optim.AdamW, progress: Progress) -> None:
    """Write weights, optimizer moments and progress; the progress file is written last and names a whole checkpoint."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    save_file(tensors, folder / "checkpoint.tmp")
    (folder / "checkpoint.tmp").replace(folder / "checkpoint.safetensors")
    (folder / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")


def load_checkpoint(folder: Path, model: Storyteller, optimizer: torch.optim.AdamW) -> Progress:
    """Restore what `save_checkpoint` wrote; without a checkpoint return a fresh progress."""
    if not (folder / "progress.json").exists():
        return Progress()
    tensors = load_file(folder / "checkpoint.safetensors")
    model.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("model.")})
    state = optimizer.state_dict()
    state["state"] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            state["state"].setdefault(int(index), {})[key] = value
    optimizer.load_state_dict(state)
    return Progress(**json.loads((folder / "progress.json").read_text(encoding="utf-8")))


def train(
    model: Storyteller, rows_of: EpochRows, validation: list[Row], config: TrainingConfig, folder: Path
) -> Progress:
    """Train until `num_steps`, resuming from the checkpoint in `folder` when there is one."""
    torch.manual_seed(config.seed)
    optimizer = make_optimizer(model, config)
    progress = load_checkpoint(folder, model, optimizer)
    batches = scheduled_batches(rows_of, config, progress.step)
    started_s = time.monotonic() - progress.wall_s
    recent: list[float] = []
    while progress.step < config.num_steps:
        model.train(not config.dropout_pause[0] <= progress.step < config.dropout_pause[1])
        recent.append(train_step(model, optimizer, next(batches), progress.step, config))
        progress.step += 1
        progress.num_tokens += config.num_batch_tokens
        if progress.step % config.log_every == 0:
            progress.wall_s, progress.train_loss = time.monotonic() - started_s, sum(recent) / len(recent)
            logger.info("step %d loss %.4f after %.0f s", progress.step, progress.train_loss, progress.wall_s)
            recent.clear()
        if progress.step % config.save_every == 0 or progress.step == config.num_steps:
            progress.val_loss = validation_loss(model, validation)
            logger.info("step %d validation loss %.4f", progress.step, progress.val_loss)
            save_checkpoint(folder, model, optimizer, progress)
    return progress


def train_step(
    model: Storyteller, optimizer: torch.optim.AdamW, rows: list[Row], step: int, config: TrainingConfig
) -> float:
    """Do one optimizer step and return its loss."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(step, config)
    loss = loss_of(model, rows, first_position_of(step, model.config.num_positions, len(rows[0][0]) - 1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def first_position_of(step: int, num_positions: int, length: int) -> int:
    """Return where a batch's rows begin: at 0, or for every second step anywhere, so that all positions learn."""
    if step % 2 == 0:
        return 0
    return random.Random(step).randint(0, num_positions - length)
