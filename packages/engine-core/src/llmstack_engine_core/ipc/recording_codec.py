"""Encoding of `StepRecording` as plain lists.

It is requested by debugging tools, so it need not be fast.
"""

from __future__ import annotations

from typing import Any, Final

from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.outputs_codec import (
    decode_events,
    decode_phases,
    decode_stats,
    encode_events,
    encode_stats,
)
from llmstack_engine_core.ipc.request_codec import MAX_REQUEST_ID_LENGTH, MAX_TENANT_LENGTH
from llmstack_types import ScheduledRequest, StepRecord, StepRecording

MAX_STEPS: Final = 65_536
_TIME = fields.number()
_COUNT = fields.integer()
_REQUEST_ID = fields.text(MAX_REQUEST_ID_LENGTH, min_length=1)
_TENANT = fields.text(MAX_TENANT_LENGTH)
_KEY = fields.text(MAX_REQUEST_ID_LENGTH)


def encode_recent_steps(recent: StepRecording) -> list[Any]:
    """Steps and events, oldest first."""
    steps = [
        [record.start_s, record.phases, encode_stats(record.stats), [_encode_row(row) for row in record.rows]]
        for record in recent.steps
    ]
    return [recent.now_s, steps, encode_events(recent.events), [list(pair) for pair in recent.tenants.items()]]


def _encode_row(row: ScheduledRequest) -> list[Any]:
    return [
        row.request_id,
        row.num_computed_tokens,
        row.num_scheduled_tokens,
        fields.pack_uint32(row.new_block_ids, "new_block_ids"),
        fields.pack_uint32(row.draft_token_ids, "draft_token_ids"),
    ]


def decode_recent_steps(value: Any) -> StepRecording:
    """The inverse of `encode_recent_steps`."""
    now_s, steps, events, tenants = fields.row(value, "recording", 4)
    records = [_decode_record(item) for item in _list(steps, "steps")]
    return StepRecording(_TIME(now_s, "now_s"), records, decode_events(events), _decode_tenants(tenants))


def _decode_tenants(value: Any) -> dict[str, str]:
    pairs = [fields.row(pair, "tenant", 2) for pair in _list(value, "tenants")]
    return {_KEY(key, "request_id"): _TENANT(tenant, "tenant") for key, tenant in pairs}


def _decode_record(value: Any) -> StepRecord:
    start_s, phases, stats, rows = fields.row(value, "step", 4)
    decoded = [_decode_row(row) for row in _list(rows, "rows")]
    return StepRecord(_TIME(start_s, "start_s"), decode_phases(phases), decode_stats(stats), decoded)


def _decode_row(value: Any) -> ScheduledRequest:
    request_id, num_computed, num_scheduled, block_ids, draft_ids = fields.row(value, "row", 5)
    return ScheduledRequest(
        _REQUEST_ID(request_id, "request_id"),
        _COUNT(num_computed, "num_computed_tokens"),
        _COUNT(num_scheduled, "num_scheduled_tokens"),
        fields.unpack_uint32(block_ids, "new_block_ids"),
        fields.unpack_uint32(draft_ids, "draft_token_ids"),
    )


def _list(value: Any, name: str) -> list[Any]:
    if type(value) is not list or len(value) > MAX_STEPS:
        raise CodecError(f"{name} must be a list of at most {MAX_STEPS} items")
    return value
