"""The numeric contract id: equal where two engine cores compute equal bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from llmstack_types import EngineReady, ModelRunnerConfig

NOT_NUMERIC: Final = ("caches", "decode", "kv_cache")
"""Entries of the model runner's report that may differ between two engine cores that compute equal bits."""


def numeric_contract_id(
    config: ModelRunnerConfig, dtype: str, kv_cache_dtype: str, vocab_size: int, backends: Mapping[str, str]
) -> str:
    """Digest of what the bits of a result depend on: weights, kernels, data types, quantization, ranks, processors.

    `backends`: The report of the model runner; it includes the digest of the weights and the variants of the kernels.
    """
    not_numeric = NOT_NUMERIC if config.tensor_parallel_size > 1 else (*NOT_NUMERIC, "ranks")  # stages change no bit
    parts: dict[str, object] = {
        "backends": {name: value for name, value in backends.items() if name not in not_numeric},
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "vocab_size": vocab_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_expert_parallel": config.enable_expert_parallel and config.tensor_parallel_size > 1,
        "quantization": config.quantization,
        "logits_processors": list(config.logits_processors),
        "hf_overrides": config.hf_overrides,
        "dummy_seed": config.seed if config.load_format == "dummy" else None,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def numeric_difference(first: EngineReady, other: EngineReady) -> str:
    """The difference between two numeric contract ids, as `NAME is A, but B`; empty for equal ids."""
    if first.numeric_contract_id == other.numeric_contract_id:
        return ""
    pairs = {name: (getattr(first, name), getattr(other, name)) for name in ("dtype", "kv_cache_dtype", "vocab_size")}
    names = sorted({*first.backends, *other.backends} - set(NOT_NUMERIC))
    pairs |= {name: (first.backends.get(name, "none"), other.backends.get(name, "none")) for name in names}
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            return f"{name} is {ours}, but {theirs}"
    return f"numeric contract id is {first.numeric_contract_id}, but {other.numeric_contract_id}"
