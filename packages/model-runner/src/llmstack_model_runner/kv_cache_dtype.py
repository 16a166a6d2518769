"""What keys and values are stored in."""

from __future__ import annotations

from collections.abc import Mapping

import torch

AUTO = "auto"
_FP8_CAPABILITY = (8, 9)
_NAME_TO_DTYPE: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def resolve_kv_cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type that `name` asks for; `auto` is `dtype`, what the model computes in.

    Raises:
        ValueError: Unknown name, or neither `dtype` nor one of 8 bits: no kernel reads another one.
    """
    if name == AUTO:
        return dtype
    if name not in _NAME_TO_DTYPE:
        known = ", ".join((AUTO, *_NAME_TO_DTYPE))
        raise ValueError(f"kv_cache_dtype {name[:64]!r} is not supported; {known} are")
    stored_as = _NAME_TO_DTYPE[name]
    if stored_as.itemsize > 1 and stored_as != dtype:
        raise ValueError(
            f"kv_cache_dtype {name}: the model computes in {dtype_name(dtype)}, and keys and values are stored in that "
            f"or in fp8; use --dtype {name}"
        )
    return stored_as


def check_capability(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """ValueError where a GPU of this compute capability cannot read a KV cache of this type."""
    if dtype == torch.float8_e4m3fn and capability < _FP8_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (_FP8_CAPABILITY, capability))
        raise ValueError(f"kv_cache_dtype fp8 needs a GPU of compute capability {needed}; this one has {found}")


def dtype_name(dtype: torch.dtype) -> str:
    """`float8_e4m3fn` of `torch.float8_e4m3fn`."""
    return str(dtype).removeprefix("torch.")
