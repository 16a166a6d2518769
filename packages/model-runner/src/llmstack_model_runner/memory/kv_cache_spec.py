"""KV cache spec: the facts about a loaded model that the engine core receives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llmstack_model_runner.memory.kv_cache_dtype import dtype_name
from llmstack_model_runner.models import CausalLM, Classifier, Encoder, Model
from llmstack_model_runner.models.config_values import embedding_size
from llmstack_types import KVCacheGroupSpec, KVCacheSpec, MediaSpec
from llmstack_types.vocabulary import MediaKind

CPU_ROWS_WHILE_READING = 12
"""Rows of a product that take as long as its weights take to be read: in a second two cores compute 300 to 400 billion
operations in bfloat16, and read 25 to 30 GB."""
MAX_VECTORS_OF_ITEM = 256
"""Vectors in place of tokens that are one item. Longer prompts are several: each is cached and evicted by itself, so
that a long prompt needs no more room than a short one, and two with the same beginning share it."""


_BOOK_BYTES = 350
"""What the engine core keeps of a block that can be found: its tokens and places. In a model of states that is all."""


def make_kv_cache_spec(
    model: Model,
    model_config: Mapping[str, Any],
    dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    kv_cache_dtype: torch.dtype | None = None,
    groups: tuple[KVCacheGroupSpec, ...] = (),
    takes_vectors: bool = False,
    weight_bytes: int = 0,
) -> KVCacheSpec:
    """Shape of the KV storage, and what the model can do.

    Args:
        model: The model; after `load_weights`, since only then all of its facts are certain.
        model_config: The parsed config.json.
        dtype: The type in which the model computes.
        block_size: Tokens per block.
        device: Where it computes.
        kv_cache_dtype: Data type of keys and values; None means `dtype`.
        groups: All layers, from `group_stage_layers`.
        takes_vectors: Prompts may be vectors in place of tokens.
        weight_bytes: That a step reads, those of an encoder included.

    Raises:
        ValueError: This model takes no vectors.
    """
    spec = model.kv_spec
    stored_as = dtype if kv_cache_dtype is None else kv_cache_dtype
    return KVCacheSpec(
        num_layers=spec.num_layers,
        block_size=block_size,
        dtype=dtype_name(dtype),
        # Without KV the blocks only bound the tokens in flight; one byte each accounts for the block tables.
        bytes_per_block=max((group.bytes_per_block for group in groups if group.kind != "state"), default=0)
        or (_BOOK_BYTES if groups else 1),
        vocab_size=spec.vocab_size,
        device=device.type,
        embedding_size=embedding_size(model_config),
        is_generative=isinstance(model, CausalLM),
        is_causal=not isinstance(model, Encoder),
        num_labels=model.num_labels if isinstance(model, Classifier) else 0,
        kv_cache_dtype=dtype_name(stored_as),
        groups=groups,
        bytes_per_state=sum(group.bytes_per_block for group in groups if group.kind == "state"),
        media=_media_spec(model, _step_units(model, dtype, device, weight_bytes), takes_vectors=takes_vectors),
        weight_bytes=weight_bytes,
    )


def _step_units(model: Model, dtype: torch.dtype, device: torch.device, weight_bytes: int) -> int:
    """Units of the encoder that take about as long on a CPU as a step with few rows, which reads all other weights."""
    encoder = model.media_encoder()
    if encoder is None or device.type != "cpu" or not encoder.num_weights:
        return 0
    num_weights = weight_bytes // dtype.itemsize - encoder.num_weights
    return max(1, CPU_ROWS_WHILE_READING * num_weights // encoder.num_weights)


def _media_spec(model: Model, step_units: int, *, takes_vectors: bool) -> MediaSpec | None:
    """The items that the model takes besides tokens: kinds of its encoder, and vectors where the user asks for that."""
    encoder = model.media_encoder()
    if encoder is not None and model.cross_kv is not None:
        if takes_vectors:
            raise ValueError("--enable-prompt-embeds: this model has cross attention, and takes token ids only")
        return MediaSpec(
            model.cross_kv.vector_size, encoder.num_layers, False, encoder.max_num_tokens,
            slice_units=encoder.slice_units, step_units=step_units, has_cross_attention=True,
            alignment_size=model.alignment_size,
        )  # fmt: skip
    if encoder is None and not takes_vectors:
        return None
    user_size = model.vector_size if encoder is not None or isinstance(model, CausalLM) else None
    size = user_size if encoder is None else model.item_size
    if size is None or (takes_vectors and user_size is None):
        raise ValueError("--enable-prompt-embeds: the code of this model takes token ids only")
    num_layers: dict[MediaKind, int] = {} if encoder is None else {**encoder.num_layers}
    max_num_tokens: dict[MediaKind, int] = {} if encoder is None else {**encoder.max_num_tokens}
    if takes_vectors:
        num_layers["embeds"], max_num_tokens["embeds"] = 0, MAX_VECTORS_OF_ITEM
    if encoder is None:
        return MediaSpec(size, num_layers, max_num_tokens=max_num_tokens)
    return MediaSpec(
        size, num_layers, encoder.is_atomic, max_num_tokens, slice_units=encoder.slice_units, step_units=step_units
    )
