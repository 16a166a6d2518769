"""Data type that a model computes in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from llmstack_model_files import check_safetensors, safetensors_files
from llmstack_types.vocabulary import DTYPE_ALIASES, DType, words_of

_NAME_TO_DTYPE: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_SAFETENSORS_TO_DTYPE: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


def resolve_dtype(
    name: str, config: Mapping[str, Any], model_path: str | Path, load_format: str = "auto"
) -> torch.dtype:
    """The data type for a value of `--dtype`; `auto` is the configuration's, else the first weight's, else float32.

    Raises:
        ValueError: The name is unknown.
    """
    if name != "auto":
        return _by_name(name, "dtype")
    configured = config.get("dtype") or config.get("torch_dtype")
    if configured is not None:
        return _by_name(str(configured).removeprefix("torch."), "config.json: dtype")
    if load_format != "dummy":
        for path in safetensors_files(Path(model_path))[:1]:
            for info in check_safetensors(path).values():
                if info.dtype in _SAFETENSORS_TO_DTYPE:
                    return _SAFETENSORS_TO_DTYPE[info.dtype]
    return torch.float32


def _by_name(name: str, field: str) -> torch.dtype:
    dtype = _NAME_TO_DTYPE.get(DTYPE_ALIASES.get(name, name))
    if dtype is None:
        _, *others, last = words_of(DType)  # `auto` names none
        raise ValueError(f"{field} {name[:64]!r} is not supported; {', '.join(others)} and {last} are.")
    return dtype
