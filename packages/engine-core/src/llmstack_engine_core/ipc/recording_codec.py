"""Encoding of `StepRecording` as plain lists.

The rows of a step travel as packed columns, and each request id once: a page that follows 256 requests reads thousands
of rows per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.outputs_codec import (
    decode_events,
    decode_phases,
    decode_stats,
    encode_events,
)
from llmstack_engine_core.ipc.request_codec import MAX_LORA_NAME_LENGTH, MAX_REQUEST_ID_LENGTH, MAX_TENANT_LENGTH
from llmstack_engine_core.row_columns import RowColumns
from llmstack_types import RequestNote, StepRecord, StepRecording

MAX_STEPS: Final = 65_536
_TIME = fields.number()
_REQUEST_IDS = fields.texts(MAX_REQUEST_ID_LENGTH, max_items=1 << 20, min_length=1)
_TENANT = fields.text(MAX_TENANT_LENGTH)
_KEY = fields.text(MAX_REQUEST_ID_LENGTH)
_LORA_NAME = fields.text(MAX_LORA_NAME_LENGTH)
_COUNT = fields.integer(0)


def encode_recent_steps(recent: StepRecording) -> list[Any]:
    """Steps and events, oldest first."""
    names = _Names()
    steps = [
        [record.start_s, record.phases, list(record.stats), _encode_rows(RowColumns.of(record.rows), names)]
        for record in recent.steps
    ]
    return [
        recent.now_s, list(names.id_to_index), steps, encode_events(recent.events),
        [list(pair) for pair in recent.tenants.items()],
        [[request_id, *note] for request_id, note in recent.notes.items()],
    ]  # fmt: skip


class _Names:
    """The request ids of a message, each of which is sent once."""

    def __init__(self) -> None:
        self.id_to_index: dict[str, int] = {}
        self._last: Sequence[str] = ()
        self._packed = b""

    def pack(self, request_ids: Sequence[str]) -> bytes:
        """The indexes of ids; most steps have the rows of the step before."""
        if request_ids != self._last:
            known = self.id_to_index
            for request_id in request_ids:
                known.setdefault(request_id, len(known))
            self._last = request_ids
            self._packed = fields.pack_uint32(map(known.__getitem__, request_ids), "request_ids")
        return self._packed


def _encode_rows(columns: RowColumns, names: _Names) -> list[Any]:
    return [
        names.pack(columns.request_ids),
        fields.pack_uint32(columns.num_computed_tokens, "num_computed_tokens"),
        fields.pack_uint32(columns.num_scheduled_tokens, "num_scheduled_tokens"),
        _encode_sparse(columns.new_block_ids, "new_block_ids"),
        _encode_sparse(columns.draft_token_ids, "draft_token_ids"),
    ]


def _encode_sparse(index_to_values: Mapping[int, Sequence[int]], name: str) -> list[list[Any]]:
    """Row numbers with their values, where there are any."""
    return [[index, fields.pack_uint32(values, name)] for index, values in index_to_values.items()]


def decode_recent_steps(value: Any) -> StepRecording:
    """The inverse of `encode_recent_steps`."""
    now_s, names, steps, events, tenants, notes = fields.row(value, "recording", 6)
    given = _GivenNames(_REQUEST_IDS(names, "request_ids"))
    records = [_decode_record(item, given) for item in _list(steps, "steps")]
    return StepRecording(
        _TIME(now_s, "now_s"), records, decode_events(events), _decode_tenants(tenants),
        dict(map(_decode_note, _list(notes, "notes"))),
    )  # fmt: skip


class _GivenNames:
    """The request ids of a message that is read: the inverse of `_Names`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._packed: object = b""
        self._last: list[str] = []

    def unpack(self, packed: Any) -> list[str]:
        """The ids at indexes. Steps one after the other with the same rows get one list."""
        if packed != self._packed:
            indexes = fields.unpack_uint32(packed, "request_ids")
            if max(indexes, default=-1) >= len(self._names):
                raise CodecError(f"request_ids must name ids from 0 to {len(self._names) - 1}")
            self._packed, self._last = packed, list(map(self._names.__getitem__, indexes))
        return self._last


def _decode_tenants(value: Any) -> dict[str, str]:
    pairs = [fields.row(pair, "tenant", 2) for pair in _list(value, "tenants")]
    return {_KEY(key, "request_id"): _TENANT(tenant, "tenant") for key, tenant in pairs}


def _decode_note(value: Any) -> tuple[str, RequestNote]:
    key, num_resumed, lora_name, earlier_s, given_s = fields.row(value, "note", 5)
    note = RequestNote(
        _COUNT(num_resumed, "num_resumed_tokens"), _LORA_NAME(lora_name, "lora_name"),
        _TIME(earlier_s, "earlier_s"), _TIME(given_s, "given_s"),
    )  # fmt: skip
    return _KEY(key, "request_id"), note


def _decode_record(value: Any, names: _GivenNames) -> StepRecord:
    start_s, phases, stats, rows = fields.row(value, "step", 4)
    return StepRecord(
        _TIME(start_s, "start_s"), decode_phases(phases), decode_stats(stats), _decode_rows(rows, names)
    )  # fmt: skip


def _decode_rows(value: Any, names: _GivenNames) -> RowColumns:
    indexes, computed, scheduled, block_ids, draft_ids = fields.row(value, "rows", 5)
    request_ids = names.unpack(indexes)
    num_rows = len(request_ids)
    return RowColumns(
        request_ids, fields.unpack_uint32(computed, "num_computed_tokens", num_rows),
        fields.unpack_uint32(scheduled, "num_scheduled_tokens", num_rows),
        _decode_sparse(block_ids, num_rows, "new_block_ids"), _decode_sparse(draft_ids, num_rows, "draft_token_ids"),
    )  # fmt: skip


def _decode_sparse(value: Any, num_rows: int, name: str) -> dict[int, list[int]]:
    index_to_values: dict[int, list[int]] = {}
    for index, packed in (fields.row(pair, name, 2) for pair in _list(value, name)):
        if type(index) is not int or not 0 <= index < num_rows:
            raise CodecError(f"{name} must name rows from 0 to {num_rows - 1}")
        index_to_values[index] = fields.unpack_uint32(packed, name)
    return index_to_values


def _list(value: Any, name: str) -> list[Any]:
    if type(value) is not list or len(value) > MAX_STEPS:
        raise CodecError(f"{name} must be a list of at most {MAX_STEPS} items")
    return value
