"""Encoding of `EngineCoreOutputs` as columns.

Request ids and tokens are dense columns; the others are sparse, since most rows have their defaults. A message of 256
rows then costs a handful of calls into C instead of thousands of Python operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, repeat
from operator import itemgetter
from typing import Any, Final

from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.kv_transfer_codec import decode_kv_transfers, encode_kv_transfer
from llmstack_engine_core.ipc.request_codec import MAX_REQUEST_ID_LENGTH, MAX_TENANT_LENGTH
from llmstack_engine_core.ipc.shadow_codec import decode_shadow, encode_shadow
from llmstack_types import (
    BlockEviction,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    RequestEvent,
    RequestStatus,
    SchedulerStats,
    StepPhases,
    TokenLogprobs,
)

_REASONS: Final = tuple(FinishReason)
_REASON_TO_CODE: Final = {reason: code for code, reason in enumerate(_REASONS)}
_STATUSES: Final = tuple(RequestStatus)
_STATUS_TO_CODE: Final = {status: code for code, status in enumerate(_STATUSES)}
_FLOAT_SIZE: Final = 4
_TIMESTAMP = fields.number()
_REQUEST_IDS = fields.texts(MAX_REQUEST_ID_LENGTH, min_length=1)
_ERRORS = fields.texts(4096)
MAX_STATS_COUNTERS: Final = 1024
_TENANTS = fields.texts(MAX_TENANT_LENGTH, MAX_STATS_COUNTERS)


def decode_stats(value: Any) -> SchedulerStats:
    """The figures, from a list in the order of their class."""
    *values, names = fields.row(value, "scheduler_stats", len(SchedulerStats._fields))
    tenants = tuple(_TENANTS(names, "waiting_tenants"))
    counters = list(_COUNTERS_OF(values))
    for index in _COUNTER_LISTS:
        items = values[index]
        if type(items) is not list or len(items) > MAX_STATS_COUNTERS:
            name = SchedulerStats._fields[index]
            raise CodecError(f"{name} must be a list of at most {MAX_STATS_COUNTERS} integers")
        counters += items
        values[index] = tuple(items)
    fields.check_counters(counters, "scheduler_stats")
    if len(tenants) != len(values[-1]):
        raise CodecError("waiting_tenants must hold one name for each number")
    return SchedulerStats(*[*values, tenants])


# The places of the figures, without the last one, which holds names.
_COUNTER_LISTS: Final = tuple(
    index
    for index, name in enumerate(SchedulerStats._fields[:-1])
    if isinstance(SchedulerStats._field_defaults[name], tuple)
)
_COUNTERS_OF: Final = itemgetter(*(set(range(len(SchedulerStats._fields) - 1)) - set(_COUNTER_LISTS)))


def encode_outputs(message: EngineCoreOutputs) -> list[Any]:
    """The fields of one step's outputs."""
    rows = message.outputs
    num_rows = len(rows)
    request_ids, token_ids, *columns = zip(*rows, strict=True) if rows else ((),) * len(EngineCoreOutput._fields)
    flat_ids = list(chain.from_iterable(token_ids))
    has_counts = len(flat_ids) != num_rows or not all(token_ids)
    stats = message.scheduler_stats
    return [
        message.timestamp_s,
        None if stats is None else list(stats),
        request_ids,
        fields.pack_uint32(map(len, token_ids), "new_token_ids") if has_counts else None,
        fields.pack_uint32(flat_ids, "new_token_ids"),
        *[
            None if column.count(default) == num_rows else _encode_sparse(column, default, pack)
            for column, (default, pack) in zip(columns, _SPARSE_COLUMNS, strict=True)
        ],
        encode_events(message.events) if message.events else None,
        message.phases,
        _encode_evictions(message.evictions) if message.evictions else None,
        None if message.shadow is None else encode_shadow(message.shadow),
    ]


def _encode_evictions(evictions: Sequence[BlockEviction]) -> list[bytes]:
    return [
        fields.pack_floats([eviction.lifetime_s for eviction in evictions], "lifetime_s"),
        fields.pack_floats([eviction.idle_s for eviction in evictions], "idle_s"),
        fields.pack_uint32([len(eviction.reuse_gaps_s) for eviction in evictions], "reuse_gaps_s"),
        fields.pack_floats(chain.from_iterable(eviction.reuse_gaps_s for eviction in evictions), "reuse_gaps_s"),
    ]


def _decode_evictions(value: Any) -> list[BlockEviction]:
    packed_lifetimes, packed_idles, packed_counts, packed_gaps = fields.row(value, "evictions", 4)
    lifetimes = fields.unpack_floats(packed_lifetimes, "lifetime_s")
    idles = fields.unpack_floats(packed_idles, "idle_s", len(lifetimes))
    counts = fields.unpack_uint32(packed_counts, "reuse_gaps_s", len(lifetimes))
    gaps = fields.unpack_floats(packed_gaps, "reuse_gaps_s", sum(counts))
    return [
        BlockEviction(lifetime_s, idle_s, tuple(gaps[end - count : end]))
        for lifetime_s, idle_s, count, end in zip(lifetimes, idles, counts, accumulate(counts), strict=True)
    ]


def encode_events(events: Sequence[RequestEvent]) -> list[Any]:
    """Events as columns: request ids, status codes, times."""
    codes = bytes([_STATUS_TO_CODE[event.status] for event in events])
    times = fields.pack_floats([event.time_s for event in events], "time_s")
    return [[event.request_id for event in events], codes, times]


def decode_events(value: Any) -> list[RequestEvent]:
    """The inverse of `encode_events`."""
    ids, codes, packed_times = fields.row(value, "events", 3)
    request_ids = _REQUEST_IDS(ids, "request_id")
    if type(codes) is not bytes or len(codes) != len(request_ids) or (codes and max(codes) >= len(_STATUSES)):
        raise CodecError(f"status must hold a code below {len(_STATUSES)} for each event")
    times = fields.unpack_floats(packed_times, "time_s", len(request_ids))
    return [RequestEvent(*event) for event in zip(request_ids, map(_STATUSES.__getitem__, codes), times, strict=True)]


def decode_phases(value: Any) -> StepPhases:
    """The durations of one step's parts."""
    return StepPhases(*fields.checked_numbers(fields.row(value, "phases", 3), "phases"))


def _encode_sparse(column: Sequence[Any], default: Any, pack: Callable[[list[Any]], Any]) -> list[Any]:
    indices = [index for index, value in enumerate(column) if value != default]
    return [fields.pack_uint32(indices, "row"), pack([column[index] for index in indices])]


def _encode_logprobs(entries: Sequence[TokenLogprobs | None]) -> list[bytes]:
    present = [entry for entry in entries if entry is not None]
    counts = [0 if entry is None else len(entry.token_ids) for entry in entries]
    if len(entries) - counts.count(0) != len(present):
        raise CodecError("token_ids of log-probabilities must not be empty")
    if any(len(entry.logprobs) != len(entry.token_ids) for entry in present):
        raise CodecError("token_ids and logprobs must be of one length")
    return [
        fields.pack_uint32(counts, "logprobs"),
        fields.pack_uint32(chain.from_iterable(entry.token_ids for entry in present), "logprobs"),
        fields.pack_floats(chain.from_iterable(entry.logprobs for entry in present), "logprobs"),
        fields.pack_uint32([entry.rank for entry in present], "rank"),
    ]


# Default and encoding of each column but the first two, in the order of `EngineCoreOutput`.
_SPARSE_COLUMNS: Final[tuple[tuple[Any, Callable[[list[Any]], Any]], ...]] = (
    (None, lambda values: [_encode_logprobs(value) for value in values]),
    (None, lambda values: [_encode_logprobs(value) for value in values]),
    (None, lambda values: bytes([_REASON_TO_CODE[value] for value in values])),
    (None, lambda values: fields.pack_uint32(values, "stop_reason")),
    (-1, lambda values: fields.pack_uint32(values, "num_cached_tokens")),
    (None, list),
    (None, list),
    (None, lambda values: list(map(encode_kv_transfer, values))),
)


def decode_outputs(values: list[Any]) -> EngineCoreOutputs:
    """The inverse of `encode_outputs`."""
    request_ids = _REQUEST_IDS(values[2], "request_id")
    num_rows = len(request_ids)
    columns = zip(
        request_ids,
        _decode_token_ids(values[3], values[4], num_rows),
        *[
            repeat(default, num_rows) if value is None else _decode_sparse(value, num_rows, name, unpack, default)
            for value, (name, unpack, default) in zip(values[5:13], _SPARSE_DECODERS, strict=True)
        ],
        strict=True,
    )
    outputs: list[EngineCoreOutput] = list(map(tuple.__new__, repeat(EngineCoreOutput), columns))
    stats = None if values[1] is None else decode_stats(values[1])
    events = () if values[13] is None else decode_events(values[13])
    phases = None if values[14] is None else decode_phases(values[14])
    evictions = () if values[15] is None else _decode_evictions(values[15])
    shadow = None if values[16] is None else decode_shadow(values[16])
    timestamp_s = _TIMESTAMP(values[0], "timestamp_s")
    return EngineCoreOutputs(outputs, timestamp_s, stats, events, phases, evictions=evictions, shadow=shadow)


def _decode_token_ids(packed_counts: Any, packed_ids: Any, num_rows: int) -> list[list[int]]:
    if packed_counts is None:
        return [[token_id] for token_id in fields.unpack_uint32(packed_ids, "new_token_ids", num_rows)]
    counts = fields.unpack_uint32(packed_counts, "new_token_ids", num_rows)
    flat = fields.unpack_uint32(packed_ids, "new_token_ids", sum(counts))
    return [flat[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def _decode_sparse(value: Any, num_rows: int, name: str, unpack: fields.Check, default: Any) -> list[Any]:
    column = [default] * num_rows
    packed_indices, packed_values = fields.row(value, name, 2)
    indices = fields.unpack_uint32(packed_indices, name)
    unpacked = unpack(packed_values, name)
    if len(indices) != len(unpacked) or (indices and max(indices) >= num_rows):
        raise CodecError(f"{name} must hold one value for each of its rows")
    for index, item in zip(indices, unpacked, strict=True):
        column[index] = item
    return column


def _decode_finish_reasons(value: Any, name: str) -> list[FinishReason]:
    if type(value) is not bytes or (value and max(value) >= len(_REASONS)):
        raise CodecError(f"{name} must hold codes below {len(_REASONS)}")
    return [_REASONS[code] for code in value]


def _decode_vectors(value: Any, name: str) -> list[bytes]:
    if type(value) is not list or any(type(item) is not bytes or len(item) % _FLOAT_SIZE for item in value):
        raise CodecError(f"{name} must hold vectors of float32")
    return value


def _decode_logprobs_column(value: Any, name: str) -> list[list[TokenLogprobs | None]]:
    column = _decode_prompt_logprobs_column(value, name)
    if any(entry is None for entries in column for entry in entries):
        raise CodecError(f"{name} must hold an entry for each token")
    return column


def _decode_prompt_logprobs_column(value: Any, name: str) -> list[list[TokenLogprobs | None]]:
    if type(value) is not list:
        raise CodecError(f"{name} must be a list")
    return [_decode_logprobs(item, name) for item in value]


def _decode_logprobs(value: Any, name: str) -> list[TokenLogprobs | None]:
    packed_counts, packed_ids, packed_logprobs, packed_ranks = fields.row(value, name, 4)
    counts = fields.unpack_uint32(packed_counts, name)
    token_ids = fields.unpack_uint32(packed_ids, name, sum(counts))
    logprobs = fields.unpack_floats(packed_logprobs, name, len(token_ids))
    ranks = iter(fields.unpack_uint32(packed_ranks, name, len(counts) - counts.count(0)))
    return [
        TokenLogprobs(tuple(token_ids[end - count : end]), tuple(logprobs[end - count : end]), next(ranks))
        if count
        else None
        for count, end in zip(counts, accumulate(counts), strict=True)
    ]


# Name, decoding and default of each column but the first two, in the order of `EngineCoreOutput`.
_SPARSE_DECODERS: Final[tuple[tuple[str, fields.Check, Any], ...]] = (
    ("logprobs", _decode_logprobs_column, None),
    ("prompt_logprobs", _decode_prompt_logprobs_column, None),
    ("finish_reason", _decode_finish_reasons, None),
    ("stop_reason", fields.unpack_uint32, None),
    ("num_cached_tokens", fields.unpack_uint32, -1),
    ("error", _ERRORS, None),
    ("pooled", _decode_vectors, None),
    ("kv_transfer", decode_kv_transfers, None),
)
