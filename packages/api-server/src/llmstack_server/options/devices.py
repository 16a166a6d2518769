"""Devices of the machine for messages, read from system files without torch."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/")


def describe_devices(root: Path = _ROOT) -> str:
    """Such as `1 GPU: NVIDIA H200`, or `no GPU, 8 processors`.

    `root`: Where `proc` and `dev` are found.
    """
    names = find_gpus(root)
    if not names:
        return f"no GPU, {os.cpu_count() or 1} processors"
    return f"{len(names)} GPU{'s' if len(names) > 1 else ''}: {', '.join(names)}"


def find_gpus(root: Path = _ROOT) -> list[str]:
    """The names of NVIDIA's GPUs: their models where the driver says, else their device files."""
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    if folders:
        return [_model(folder / "information") or folder.name for folder in folders]
    return [f"/dev/{file.name}" for file in sorted((root / "dev").glob("nvidia[0-9]*"))]


def _model(information: Path) -> str:
    try:
        lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip()[:64] for line in lines if line.startswith("Model:")), "")
