"""Numeric contract: whether a loaded model's logits are bit-equal in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmstack_kernels.numeric_contract import find_breaches
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.models import Encoder, Model

HOLDS = "holds"


def describe_numeric_contract(
    model: Model,
    dtype: torch.dtype,
    device: torch.device,
    kv_cache_dtype: torch.dtype | None = None,
    is_batch_invariant: bool = False,
) -> str:
    """`holds`, or `not guaranteed` and the reason; for logs and `/server_info`.

    Args:
        model: The model, with or without its weights.
        dtype: Type that the model computes in.
        device: Device that the model computes on.
        kv_cache_dtype: Data type of keys and values; None means `dtype`.
        is_batch_invariant: Whether linear layers are packed as batch-invariant.
    """
    breaches = list(_find_breaches(model, dtype, device, is_batch_invariant))
    if device.type == "cpu" and kv_cache_dtype not in (None, dtype):
        breaches.append(f"a KV cache of {str(kv_cache_dtype).removeprefix('torch.')} is read by PyTorch")
    return f"not guaranteed: {', '.join(breaches)}" if breaches else HOLDS


def for_ranks(numeric_contract: str, own: Sharding) -> str:
    """The contract of several ranks: sums over ranks have other bits than those of one rank, equal for equal sizes."""
    return numeric_contract if own.size == 1 else f"{numeric_contract} (tensor_parallel_size {own.size})"


def check_deterministic(numeric_contract: str) -> None:
    """Checks that deterministic inference, if requested, is possible.

    Raises:
        ValueError: `numeric_contract`, from `describe_numeric_contract`, does not hold; the message has the reason.
    """
    if numeric_contract != HOLDS:
        raise ValueError(f"--enable-deterministic-inference: bit-equal results are {numeric_contract}")


def _find_breaches(model: Model, dtype: torch.dtype, device: torch.device, is_batch_invariant: bool) -> Iterator[str]:
    if not model.keeps_numeric_contract:
        yield f"modelling code of {model.implementation}"
    if isinstance(model, Encoder):
        yield "attention of encoders runs in PyTorch"
    else:
        has_states = any(layer.kind == "state" for layer in model.kv_spec.layers)
        own = model.kv_spec
        yield from find_breaches(device.type, dtype, own.head_dim, is_batch_invariant, has_states, own.index_dim)
