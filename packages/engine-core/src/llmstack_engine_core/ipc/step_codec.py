"""Encoding of `SchedulerOutput`, for the processes that compute a step together."""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.request_codec import (
    MAX_REQUEST_ID_LENGTH,
    decode_pooling_params,
    decode_sampling_params,
    encode_pooling_params,
    encode_sampling_params,
)
from llmstack_types import NewRequest, ScheduledRequest, SchedulerOutput

_REQUEST_ID = fields.text(MAX_REQUEST_ID_LENGTH, min_length=1)
_REQUEST_IDS = fields.texts(MAX_REQUEST_ID_LENGTH, min_length=1)
_LORA_NAME = fields.optional(fields.text(1024))
_COUNT = fields.integer()
_NUM_STEP_FIELDS: Final = 10
_NUM_NEW_FIELDS: Final = 7


def encode_step(scheduled: SchedulerOutput) -> list[Any]:
    """The fields of one step; what every row has goes as columns of packed numbers."""
    rows = scheduled.scheduled_requests
    return [
        scheduled.step,
        [_encode_new(request) for request in scheduled.new_requests],
        [row.request_id for row in rows],
        fields.pack_uint32((row.num_computed_tokens for row in rows), "num_computed_tokens"),
        fields.pack_uint32((row.num_scheduled_tokens for row in rows), "num_scheduled_tokens"),
        pack_lists([row.new_block_ids for row in rows], "new_block_ids"),
        pack_lists([row.draft_token_ids for row in rows], "draft_token_ids"),
        list(scheduled.removed_request_ids),
        scheduled.total_num_scheduled_tokens,
        [
            fields.pack_uint32(chain.from_iterable(pairs), "copies")
            for pairs in (scheduled.swap_outs, scheduled.swap_ins, scheduled.block_copies)
        ],
    ]


def decode_step(value: Any) -> SchedulerOutput:
    """The inverse of `encode_step`.

    Raises:
        CodecError: It is no step; the text names the field.
    """
    step, new, ids, computed, scheduled, blocks, drafts, removed, total, copies = fields.row(
        value, "step", _NUM_STEP_FIELDS
    )
    request_ids = _REQUEST_IDS(ids, "request_ids")
    num_rows = len(request_ids)
    columns = (
        fields.unpack_uint32(computed, "num_computed_tokens", num_rows),
        fields.unpack_uint32(scheduled, "num_scheduled_tokens", num_rows),
        unpack_lists(blocks, "new_block_ids", num_rows),
        unpack_lists(drafts, "draft_token_ids", num_rows),
    )
    if type(new) is not list:
        raise CodecError("new_requests must be a list")
    swap_outs, swap_ins, block_copies = (_pairs(packed) for packed in fields.row(copies, "copies", 3))
    return SchedulerOutput(
        step=_COUNT(step, "step"),
        new_requests=[_decode_new(entry) for entry in new],
        scheduled_requests=list(map(ScheduledRequest._make, zip(request_ids, *columns, strict=True))),
        removed_request_ids=_REQUEST_IDS(removed, "removed_request_ids"),
        total_num_scheduled_tokens=_COUNT(total, "total_num_scheduled_tokens"),
        swap_outs=swap_outs,
        swap_ins=swap_ins,
        block_copies=block_copies,
    )


def pack_lists(lists: list[Any], name: str) -> list[bytes]:
    """Lists of numbers in [0, 2**32): their lengths, then the numbers of all of them."""
    if not any(lists):  # as in most steps of most requests
        return [bytes(4 * len(lists)), b""]
    return [fields.pack_uint32(map(len, lists), name), fields.pack_uint32(chain.from_iterable(lists), name)]


def unpack_lists(value: Any, name: str, num_lists: int | None = None) -> list[list[int]]:
    """The inverse of `pack_lists`."""
    lengths, numbers = fields.row(value, name, 2)
    counts = fields.unpack_uint32(lengths, name, num_lists)
    flat = fields.unpack_uint32(numbers, name, sum(counts))
    if not flat:
        return [[] for _ in counts]
    found, start = [], 0
    for count in counts:
        found.append(flat[start : start + count])
        start += count
    return found


def _encode_new(request: NewRequest) -> list[Any]:
    return [
        request.request_id,
        fields.pack_uint32(request.token_ids, "token_ids"),
        request.num_prompt_tokens,
        encode_sampling_params(request.sampling_params),
        fields.pack_uint32(request.eos_token_ids, "eos_token_ids"),
        request.lora_name,
        None if request.pooling_params is None else encode_pooling_params(request.pooling_params),
    ]


def _decode_new(value: Any) -> NewRequest:
    request_id, token_ids, num_prompt_tokens, params, eos, lora_name, pooling = fields.row(
        value, "new_request", _NUM_NEW_FIELDS
    )
    return NewRequest(
        request_id=_REQUEST_ID(request_id, "request_id"),
        token_ids=fields.unpack_uint32(token_ids, "token_ids"),
        num_prompt_tokens=_COUNT(num_prompt_tokens, "num_prompt_tokens"),
        sampling_params=decode_sampling_params(params),
        eos_token_ids=tuple(fields.unpack_uint32(eos, "eos_token_ids")),
        lora_name=_LORA_NAME(lora_name, "lora_name"),
        pooling_params=decode_pooling_params(pooling),
    )


def _pairs(packed: Any) -> list[tuple[int, int]]:
    if packed == b"":
        return []
    numbers = fields.unpack_uint32(packed, "copies")
    if len(numbers) % 2:
        raise CodecError("copies must hold pairs")
    return list(zip(numbers[::2], numbers[1::2], strict=True))
