"""What can be told of a device and a model before anything large is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def resolve_device(name: str) -> torch.device:
    """The device that `name` means; `auto` prefers a GPU.

    Raises:
        ValueError: Unknown, or not at hand.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {name!r} is unknown; use auto, cpu or cuda")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError("device cuda is not available: torch finds no GPU")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def check_max_model_len(max_model_len: int, num_positions: int) -> None:
    """ValueError if requests could grow beyond the positions that the model was made for."""
    if max_model_len > num_positions:
        raise ValueError(
            f"max_model_len {max_model_len} is more than the {num_positions} positions that the model was made for"
        )


def architecture(model_config: Mapping[str, Any]) -> str:
    """The name of the model's architecture; `model_config` is the parsed config.json.

    Raises:
        ValueError: There is none.
    """
    architectures = model_config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ValueError("config.json names no architecture: the list `architectures` is missing or empty")
    return architectures[0]
