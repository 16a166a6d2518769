"""Whether a loaded model keeps the numeric contract: logits that are bit-equal however they are computed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmstack_kernels.numeric_contract import find_breaches
from llmstack_model_runner.models import Encoder, Model

HOLDS = "holds"


def describe_numeric_contract(
    model: Model,
    dtype: torch.dtype,
    device: torch.device,
    kv_cache_dtype: torch.dtype | None = None,
    is_batch_invariant: bool = False,
) -> str:
    """`holds`, or `not promised` and why; for logs and `/server_info`.

    Args:
        model: With or without its weights.
        dtype: What it computes in.
        device: Where.
        kv_cache_dtype: What keys and values are stored in; None is `dtype`.
        is_batch_invariant: What its linear layers were packed with.
    """
    breaches = list(_find_breaches(model, dtype, device, is_batch_invariant))
    if device.type == "cpu" and kv_cache_dtype not in (None, dtype):
        breaches.append(f"a KV cache of {str(kv_cache_dtype).removeprefix('torch.')} is read by PyTorch")
    return f"not promised: {', '.join(breaches)}" if breaches else HOLDS


def check_deterministic(numeric_contract: str) -> None:
    """For whoever has asked for deterministic inference.

    Raises:
        ValueError: `numeric_contract`, from `describe_numeric_contract`, does not hold; the text says why not.
    """
    if numeric_contract != HOLDS:
        raise ValueError(f"--enable-deterministic-inference: bit-equal results are {numeric_contract}")


def _find_breaches(model: Model, dtype: torch.dtype, device: torch.device, is_batch_invariant: bool) -> Iterator[str]:
    if not model.keeps_numeric_contract:
        yield f"modelling code of {model.implementation}"
    if isinstance(model, Encoder):
        yield "attention of encoders runs in PyTorch"
    else:
        yield from find_breaches(device.type, dtype, model.kv_spec.head_dim, is_batch_invariant)
