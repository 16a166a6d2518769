"""Data type of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmstack_types.vocabulary import KV_CACHE_DTYPE_ALIASES, KVCacheDType, words_of

AUTO = "auto"
_FP8_CAPABILITY = (8, 9)
_NAME_TO_DTYPE: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


def resolve_kv_cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The data type for a value of `--kv-cache-dtype`; `auto` is `dtype`, the model's.

    Raises:
        ValueError: The name is unknown, or the type is neither `dtype` nor one of 8 bits.
    """
    if name == AUTO:
        return dtype
    stored_as = _NAME_TO_DTYPE.get(KV_CACHE_DTYPE_ALIASES.get(name, name))
    if stored_as is None:
        known = ", ".join((*words_of(KVCacheDType), *KV_CACHE_DTYPE_ALIASES))
        raise ValueError(f"kv_cache_dtype {name[:64]!r} is not supported; {known} are")
    if stored_as.itemsize > 1 and stored_as != dtype:
        raise ValueError(
            f"kv_cache_dtype {name}: the model computes in {dtype_name(dtype)}, and keys and values are stored in that "
            f"or in fp8; use --dtype {name}"
        )
    return stored_as


def check_capability(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Raises ValueError if a GPU of this compute capability cannot read a KV cache of this type."""
    if dtype == torch.float8_e4m3fn and capability < _FP8_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (_FP8_CAPABILITY, capability))
        raise ValueError(f"kv_cache_dtype fp8 needs a GPU of compute capability {needed}; this one has {found}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
