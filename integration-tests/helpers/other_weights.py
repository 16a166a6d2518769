"""Checkpoints of the demo model's shape with other weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

import llmstack_demo_model

MODEL = Path(llmstack_demo_model.__file__).parent / "model"


def write_checkpoints(folder: Path) -> None:
    """The demo model, and one of its shape with other weights."""
    shutil.copytree(MODEL, folder / "first")
    shutil.copytree(MODEL, folder / "next")
    (file,) = (folder / "next").glob("*.safetensors")
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name] = tensors[name].roll(1, 0).contiguous()
    save_file(tensors, file, {"format": "pt"})
