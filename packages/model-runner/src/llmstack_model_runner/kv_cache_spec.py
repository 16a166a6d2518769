"""What the engine core is told about a loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llmstack_model_runner.kv_cache_dtype import dtype_name
from llmstack_model_runner.models import CausalLM, Classifier, Encoder, Model
from llmstack_model_runner.pooling.embedding_size import embedding_size
from llmstack_types import KVCacheSpec


def make_kv_cache_spec(
    model: Model,
    model_config: Mapping[str, Any],
    dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    kv_cache_dtype: torch.dtype | None = None,
) -> KVCacheSpec:
    """Shape of the KV storage, and what the model can do; `model_config` is the parsed config.json.

    `kv_cache_dtype`: What keys and values are stored in; None is `dtype`.
    """
    spec = model.kv_spec
    stored_as = dtype if kv_cache_dtype is None else kv_cache_dtype
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * stored_as.itemsize
    return KVCacheSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=dtype_name(dtype),
        # Without KV the blocks are mere numbers, which bound what is in flight; a byte each stands for their tables.
        bytes_per_block=token_bytes * block_size or 1,
        vocab_size=spec.vocab_size,
        device=device.type,
        embedding_size=embedding_size(model_config),
        is_generative=isinstance(model, CausalLM),
        is_causal=not isinstance(model, Encoder),
        num_labels=model.num_labels if isinstance(model, Classifier) else 0,
        kv_cache_dtype=dtype_name(stored_as),
    )
