"""The canonical form of decisions, and the running hash over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from typing import Any, Final

from llmstack_step_log.packing import pack, packed_ints, unpack
from llmstack_types import EncoderWork, EngineCoreOutput, EngineCoreOutputs, MediaItem, NewRequest, SchedulerOutput

DIGEST_SIZE: Final = 16

SCHEDULED: Final = "scheduled"
UPDATED: Final = "updated"
REFUSED: Final = "refused"
RESET: Final = "reset"
RELEASED: Final = "released"
IMPORTED: Final = "imported"
FORKED: Final = "forked"

_ROWS: Final = "scheduled_requests"
_NEW_REQUESTS: Final = "new_requests"
_STEP_FIELDS: Final = tuple(field.name for field in fields(SchedulerOutput) if field.name not in (_ROWS, _NEW_REQUESTS))
_STEP_VALUES: Final = attrgetter(*_STEP_FIELDS)
_WORK: Final = "encoder_work"
_MEDIA_COLUMN: Final = 4
"""Of a new request, which has it if it has items."""
_NUM_WORK_COUNTS: Final = 3
"""The number of an item, the first layer, and how many."""
_NUM_ROW_COUNTS: Final = 3
"""The id of a row and its two counts; what follows them is empty in most rows."""
# Log-probabilities, vectors and what a disk had pass by the scheduler and decide nothing.
_PASSED_THROUGH: Final = ("logprobs", "prompt_logprobs", "pooled", "kv_transfer", "num_disk_tokens")
_NUM_DENSE_COLUMNS: Final = 2
"""Request ids and new tokens, of which every output has its own; the other columns hold few values."""
_OUTPUT_DEFAULTS: Final = tuple(
    (index, name, EngineCoreOutput._field_defaults[name])
    for index, name in enumerate(EngineCoreOutput._fields)
    if index >= _NUM_DENSE_COLUMNS and name not in _PASSED_THROUGH
)


def pack_scheduled(scheduled: SchedulerOutput) -> bytes:
    """A step, canonically: what is empty is left out, so that a later field changes nothing while it is not used.

    Rows go in as columns: packing 1,024 rows one by one takes twice as long.
    """
    named = zip(_STEP_FIELDS, _STEP_VALUES(scheduled), strict=True)
    decided: dict[str, object] = {name: value for name, value in named if value}
    if scheduled.encoder_work:
        decided[_WORK] = [[*part[:_NUM_WORK_COUNTS], *_digests(part.item)] for part in scheduled.encoder_work]
    if scheduled.scheduled_requests:
        *dense, block_ids, draft_ids = zip(*scheduled.scheduled_requests, strict=True)
        decided[_ROWS] = [*dense, _filled(block_ids), _filled(draft_ids)]
    if scheduled.new_requests:
        decided[_NEW_REQUESTS] = [_new_request(request) for request in scheduled.new_requests]
    return pack([SCHEDULED, decided])


def _filled(column: Sequence[Sequence[int]]) -> dict[int, Sequence[int]]:
    """Row number to ids, where there are any; a quarter of the time of `_sparse`, in every step of a full batch."""
    return {index: ids for index, ids in enumerate(column) if ids} if any(column) else {}


def _sparse(column: Sequence[object], default: object) -> dict[int, Any]:
    """Row number to value, where there is one."""
    return {index: value for index, value in enumerate(column) if value != default and value != [] and value != ()}


def _new_request(request: NewRequest) -> list[Any]:
    held = [request.num_held_tokens] if request.num_held_tokens or request.media else []
    media = [[number for number, _ in request.media]] if request.media else []
    return [request.request_id, request.num_prompt_tokens, packed_ints(request.token_ids), *held, *media]


def _digests(item: MediaItem | None) -> list[bytes]:
    """The digests that name an item, without the place where its encoder reads it."""
    return [] if item is None else [item.digest]


def scheduled_rows(decided: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The rows of an unpacked step: id, tokens computed before, tokens scheduled, then what may be None."""
    if _ROWS not in decided:
        return []
    columns = decided[_ROWS]
    num_rows = len(columns[0])
    dense = [*columns[:_NUM_ROW_COUNTS], *([column.get(i) for i in range(num_rows)] for column in columns[3:])]
    return list(zip(*dense, strict=True))


def encoder_parts(decided: Mapping[str, Any]) -> list[EncoderWork]:
    """The encoder's work of an unpacked step, without the items."""
    return [EncoderWork(*part[:_NUM_WORK_COUNTS]) for part in decided.get(_WORK, ())]


def media_numbers(decided: Mapping[str, Any]) -> dict[str, list[int]]:
    """The numbers of the items of each request that has some, and that gets its first row in an unpacked step."""
    return {new[0]: new[_MEDIA_COLUMN] for new in decided.get(_NEW_REQUESTS, ()) if len(new) > _MEDIA_COLUMN}


def pack_updated(outputs: EngineCoreOutputs) -> bytes:
    """The outputs of a step, canonically: ids, their new tokens, and of the rest what is not the default."""
    rows = outputs.outputs
    if not rows:
        return pack([UPDATED, {}])
    columns = list(zip(*rows, strict=True))
    num_rows, token_ids = len(rows), columns[1]
    flat = list(chain.from_iterable(token_ids))
    # As in `encode_updated`: every row has one token exactly where the sum says so and no row has none.
    is_counted = len(flat) != num_rows or not all(token_ids)
    new_token_ids = [flat, list(map(len, token_ids))] if is_counted else flat
    decided: dict[str, object] = {"request_id": columns[0], "new_token_ids": new_token_ids}
    for index, name, default in _OUTPUT_DEFAULTS:
        column = columns[index]
        decided[name] = {} if column.count(default) == num_rows else _sparse(column, default)
    return pack([UPDATED, decided])


def updated_rows(decided: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Request id to its output in an unpacked update, by field."""
    request_ids = decided.get("request_id", ())
    rows: dict[str, dict[str, Any]] = {request_id: {} for request_id in request_ids}
    for name, column in decided.items():
        if isinstance(column, dict):
            for index, value in column.items():
                rows[request_ids[index]][name] = value
    token_ids = decided.get("new_token_ids", [])
    is_counted = bool(token_ids) and isinstance(token_ids[0], list)
    flat, counts = token_ids if is_counted else (token_ids, [1] * len(token_ids))
    start = 0
    for request_id, count in zip(request_ids, counts, strict=True):
        rows[request_id]["new_token_ids"] = flat[start : start + count]
        start += count
    return rows


def pack_refused(request_id: str) -> bytes:
    """The decision to refuse a request; the wording of the reason is no part of it."""
    return pack([REFUSED, request_id])


def pack_forked(request_id: str, num_tokens: int) -> bytes:
    """The decision to fork a request, and the number of its tokens that need not be computed."""
    return pack([FORKED, [request_id, num_tokens]])


def pack_reset(is_done: bool) -> bytes:
    """Whether cached prefixes were forgotten."""
    return pack([RESET, is_done])


def pack_released(num_sessions: int, num_tokens: int) -> bytes:
    """The released sessions of a tenant."""
    return pack([RELEASED, [num_sessions, num_tokens]])


def pack_imported(block_ids: list[int], state_id: int = 0) -> bytes:
    """Which blocks an import is to fill, and which one with the state after them; 0 for none."""
    return pack([IMPORTED, [block_ids, state_id] if state_id else block_ids])


def unpack_decision(packed: bytes) -> tuple[str, Any]:
    """The kind of a packed decision, and what it holds."""
    kind, decided = unpack(packed, list)
    return kind, decided


class DecisionHash:
    """A running hash over packed decisions: equal hashes mean equal decisions, on any machine."""

    __slots__ = ("_hash",)

    def __init__(self, before: bytes = b"") -> None:
        """`before`: The digest at a mark, from which it goes on."""
        self._hash = blake2b(before, digest_size=DIGEST_SIZE)

    def restart(self) -> None:
        """Goes on from its value alone, which a snapshot has."""
        self._hash = blake2b(self.digest(), digest_size=DIGEST_SIZE)

    def add(self, packed: bytes) -> None:
        """Takes in one decision."""
        self._hash.update(len(packed).to_bytes(4, "little") + packed)

    def digest(self) -> bytes:
        """The hash of all decisions so far."""
        return self._hash.digest()
