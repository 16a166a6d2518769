"""What can be told of a device and a model before anything large is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_LEAST_CAPABILITY = (8, 0)  # bfloat16 in tensor cores, and copies that a kernel does not wait for


def resolve_device(name: str) -> torch.device:
    """The device that `name` means; `auto` prefers a GPU.

    Raises:
        ValueError: Unknown, not at hand, or a GPU that the kernels are not made for.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {name!r} is unknown; use auto, cpu or cuda")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError("device cuda is not available: torch finds no GPU")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    _check_capability(torch.cuda.get_device_capability())
    return torch.device("cuda")


def _check_capability(capability: tuple[int, int]) -> None:
    if capability < _LEAST_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (_LEAST_CAPABILITY, capability))
        raise ValueError(
            f"the GPU has compute capability {found}, and {needed} is needed; "
            "CUDA_VISIBLE_DEVICES= (empty) hides it, then the processor computes"
        )


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
