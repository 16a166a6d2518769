"""The training loop: AdamW under a warm-up, stable, decay schedule, resumable from its last checkpoint."""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from drawing_training.batches import IGNORED, Batch, Batches
from drawing_training.network import Seer
from drawing_training.scenes import COLOURS, KINDS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How the network is trained. `patch_weight`: Of the loss that asks patches what stands there."""

    seed: int = 36
    num_steps: int = 6000
    num_decay_steps: int = 1600
    num_warmup_steps: int = 200
    num_rows: int = 32
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    patch_weight: float = 0.5
    log_every: int = 100
    save_every: int = 200


@dataclass(slots=True)
class Progress:
    """What a run has done so far; kept beside the checkpoint and in the model card."""

    step: int = 0
    num_pictures: int = 0
    wall_s: float = 0.0
    processor_s: float = 0.0
    loss: float = math.nan
    patch_loss: float = math.nan


class Trained(nn.Module):
    """The network, and heads that only training has: they ask each patch which thing's centre it holds.

    Answers alone teach a tower slowly where things are; these labels cost nothing, since the script draws the pictures.
    """

    def __init__(self, seer: Seer) -> None:
        super().__init__()
        self.seer = seer
        self.kinds = nn.Linear(seer.config.vision_width, 1 + len(KINDS))
        self.colours = nn.Linear(seer.config.vision_width, 1 + len(COLOURS))

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross-entropy of the tokens of answers, and of the patches, in nats."""
        with torch.autocast("cpu", torch.bfloat16):
            patches = self.seer.see(batch.values)
            hidden = self.seer(batch.token_ids, patches)
            is_target = batch.targets != IGNORED
            logits = self.seer.head(hidden[is_target])
            of_kinds, of_colours = self.kinds(patches), self.colours(patches)
        answers = functional.cross_entropy(logits.float(), batch.targets[is_target])
        return answers, _patch_loss(of_kinds, batch.kinds) + _patch_loss(of_colours, batch.colours)


def _patch_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Patches that hold a centre count as much as all the others together."""
    losses = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    is_centre = labels.flatten() > 0
    return losses[is_centre].mean() + losses[~is_centre].mean()


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """The learning rate of a step: linear warm-up, a plateau, then 1 - sqrt decay to zero."""
    if step < config.num_warmup_steps:
        return config.learning_rate * (step + 1) / config.num_warmup_steps
    decay_start = config.num_steps - config.num_decay_steps
    if step < decay_start:
        return config.learning_rate
    return config.learning_rate * (1 - math.sqrt((step - decay_start) / config.num_decay_steps))


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=True)


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.AdamW, progress: Progress) -> None:
    """Writes weights, moments and progress; the whole appears at once, so a run may be stopped at any time."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    save_file(tensors, folder / "checkpoint.tmp", {"progress": json.dumps(asdict(progress))})
    (folder / "checkpoint.tmp").replace(folder / "checkpoint.safetensors")
    (folder / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> Progress:
    """Restores what `save_checkpoint` wrote; without a checkpoint a fresh progress."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        return Progress()
    tensors = load_file(path)
    model.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("model.")})
    state = optimizer.state_dict()
    state["state"] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            state["state"].setdefault(int(index), {})[key] = value
    optimizer.load_state_dict(state)
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return Progress(**json.loads(header["__metadata__"]["progress"]))


def train(model: Trained, batches: Batches, config: TrainingConfig, folder: Path) -> Progress:
    """Trains until `num_steps`, from the checkpoint in `folder` where there is one."""
    optimizer = make_optimizer(model, config)
    progress = load_checkpoint(folder, model, optimizer)
    wall_s, processor_s = time.monotonic() - progress.wall_s, time.process_time() - progress.processor_s
    recent: list[tuple[float, float]] = []
    while progress.step < config.num_steps:
        batch = batches.batch(progress.step)
        recent.append(_train_step(model, optimizer, batch, progress.step, config))
        progress.step += 1
        progress.num_pictures += len(batch.values)
        if progress.step % config.log_every == 0 or progress.step == config.num_steps:
            progress.wall_s, progress.processor_s = time.monotonic() - wall_s, time.process_time() - processor_s
            progress.loss, progress.patch_loss = (sum(parts) / len(recent) for parts in zip(*recent, strict=True))
            recent.clear()
            logger.info(
                "step %d: loss %.4f, of patches %.4f, after %.0f s, %.0f s of processor",
                progress.step, progress.loss, progress.patch_loss, progress.wall_s, progress.processor_s,
            )  # fmt: skip
        if progress.step % config.save_every == 0 or progress.step == config.num_steps:
            save_checkpoint(folder, model, optimizer, progress)
    return progress


def _train_step(
    model: Trained, optimizer: torch.optim.AdamW, batch: Batch, step: int, config: TrainingConfig
) -> tuple[float, float]:
    """One step of the optimizer; both losses before it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(step, config)
    answers, patches = model.losses(batch)
    (answers + config.patch_weight * patches).backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(answers.detach()), float(patches.detach())
