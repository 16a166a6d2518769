"""Checks of what a prompt has besides tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llmstack_types import EngineCoreRequest, EngineReady, InvalidRequestError, MediaItem, MediaMemory, MediaSpec
from llmstack_types.media import DIGEST_BYTES

NO_MEDIA = MediaSpec(0, {})
_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_media(request: EngineCoreRequest, ready: EngineReady) -> None:
    """Refuses items that the model does not take, or that are not where the prompt has room for them.

    The scheduler refuses those that are larger than its encoder cache.

    Raises:
        InvalidRequestError: Names the item, as `media[0]`.
    """
    if request.kv_transfer is not None:
        text = "The KV blocks of a prompt with media are not exchanged."
        raise InvalidRequestError(text, param="kv_transfer_params")
    spec, end = ready.media or NO_MEDIA, 0
    for index, item in enumerate(request.media):
        problem = (
            _problem_of(item, spec)
            or _problem_of_vectors(item, spec.vector_size * _DTYPE_BYTES.get(ready.dtype, 0))
            or _problem_of_place(item, end, request.prompt_token_ids)
        )
        if problem is not None:
            raise InvalidRequestError(f"media[{index}] {problem}.", param=f"media[{index}]")
        end = item.end


def _problem_of(item: MediaItem, spec: MediaSpec) -> str | None:
    num_layers = spec.num_layers.get(item.kind)
    if num_layers is None:
        return f"is of the kind {item.kind}, which the model does not take"
    if len(item.digest) != DIGEST_BYTES:
        return f"has a digest of {len(item.digest)} bytes, not of {DIGEST_BYTES}"
    if (item.num_units > 0) != (num_layers > 0) or item.num_units < 0:
        return f"has {item.num_units} units for {num_layers} layers of the encoder"
    end = 0
    for start, length in item.embed_runs:
        if start < end or length < 1 or start + length > item.num_tokens:
            return "has runs of vectors that overlap, or that lie outside of it"
        end = start + length
    return _problem_of_memory(item.memory)


def _problem_of_vectors(item: MediaItem, vector_bytes: int) -> str | None:
    if item.kind != "embeds" or item.memory is None or item.memory.num_bytes == item.num_vectors * vector_bytes:
        return None
    return f"has {item.memory.num_bytes} bytes, which are not {item.num_vectors} vectors of the model's width and type"


def _problem_of_memory(memory: MediaMemory | None) -> str | None:
    if memory is None or memory.num_bytes < 1 or bool(memory.path) == bool(memory.data):
        return "has no memory"
    if memory.data and len(memory.data) != memory.num_bytes:
        return f"has {len(memory.data)} bytes in place of {memory.num_bytes}"
    return None


def _problem_of_place(item: MediaItem, first: int, token_ids: Sequence[int]) -> str | None:
    """Why it cannot stand there, behind an item that ends at `first`."""
    if item.num_tokens < 1 or item.offset < first or item.end > len(token_ids):
        return f"has the places {item.offset} to {item.end - 1}, but {first} to {len(token_ids) - 1} are free"
    runs = item.embed_runs or ((0, item.num_tokens),)
    placeholders = {one for start, length in runs for one in token_ids[item.offset + start :][:length]}
    return None if len(placeholders) == 1 else "has vectors in place of different token ids"
