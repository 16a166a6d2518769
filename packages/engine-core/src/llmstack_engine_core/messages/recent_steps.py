"""Declaration of `StepRecording`.

Each request id travels once: a page that follows 256 requests reads thousands of rows per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

from llmstack_engine_core.messages.kinds import UINT32S, CodecError, Kind, items, list_of, lists, number, optional, text
from llmstack_engine_core.messages.media import ENCODER_WORK, NUMBERED_MEDIA
from llmstack_engine_core.messages.outputs import EVENTS, PHASES, REQUEST_IDS, STATS
from llmstack_engine_core.messages.requests import MAX_LORA_NAME_LENGTH, MAX_REQUEST_ID_LENGTH, MAX_TENANT_LENGTH
from llmstack_engine_core.messages.rows import mapping, row, tuple_of
from llmstack_engine_core.messages.steps import ROWS
from llmstack_engine_core.row_columns import RowColumns
from llmstack_types import RequestNote, SessionReturn, StepRecord, StepRecording

_TIME: Final = number()
_LISTS: Final = lists(UINT32S)
_ANY_ID: Final = text(MAX_REQUEST_ID_LENGTH)
_RETURN: Final = row(
    SessionReturn,
    {
        "request_id": _ANY_ID, "last_request_id": _ANY_ID, "paused_s": _TIME, "cause": text(32), "kept_s": _TIME,
        "evicted_for": _ANY_ID,
    },
)  # fmt: skip
_NOTE: Final = row(
    RequestNote,
    {
        "lora_name": text(MAX_LORA_NAME_LENGTH), "earlier_s": _TIME, "given_s": _TIME, "went_on": optional(_RETURN),
    },
)  # fmt: skip
_KEY: Final = text(MAX_REQUEST_ID_LENGTH)
_MEDIA: Final = mapping(items(tuple_of(_KEY, NUMBERED_MEDIA)))


def _pack_sparse(index_to_values: Mapping[int, Sequence[int]], name: str) -> list[object] | None:
    """Row numbers, and the values of these rows."""
    if not index_to_values:
        return None
    return [UINT32S.pack([*index_to_values], name), _LISTS.pack([*index_to_values.values()], name)]


def _unpack_sparse(value: object, num_rows: int, name: str) -> dict[int, list[int]]:
    if value is None:
        return {}
    packed_indexes, packed_lists = list_of(value, name, 2)
    indexes = UINT32S.unpack(packed_indexes, name)
    if max(indexes, default=-1) >= num_rows:
        raise CodecError(f"{name} must name rows from 0 to {num_rows - 1}")
    return dict(zip(indexes, _LISTS.unpack(packed_lists, name, len(indexes)), strict=True))


def _pack_steps(steps: Sequence[StepRecord], name: str) -> list[object]:
    known: dict[str, int] = {}
    last: Sequence[str] = ()
    packed = []
    for step in steps:
        rows = RowColumns.of(step.rows)
        indexes = None  # most steps have the rows of the step before
        if rows.request_ids != last:
            last = rows.request_ids
            indexes = UINT32S.pack([known.setdefault(one, len(known)) for one in last], "request_ids")
        packed.append([
            step.start_s, step.phases, step.stats, indexes,
            UINT32S.pack(rows.num_computed_tokens, "num_computed_tokens"),
            UINT32S.pack(rows.num_scheduled_tokens, "num_scheduled_tokens"),
            _pack_sparse(rows.new_block_ids, "new_block_ids"), _pack_sparse(rows.draft_token_ids, "draft_token_ids"),
            ENCODER_WORK.pack(step.encoder_work, "encoder_work") if step.encoder_work else None,
            _MEDIA.pack(step.media, "media") if step.media else None,
        ])  # fmt: skip
    return [list(known), packed]


def _unpack_steps(value: object, name: str) -> list[StepRecord]:
    packed_names, packed_steps = list_of(value, name, 2)
    names = REQUEST_IDS.unpack(packed_names, "request_ids")
    request_ids: Sequence[str] = ()
    steps = []
    for step in list_of(packed_steps, name):
        *numbers, work, media = list_of(step, "step", 10)
        start_s, phases, stats, indexes, computed, scheduled, block_ids, draft_ids = numbers
        if indexes is not None:
            found = UINT32S.unpack(indexes, "request_ids")
            if max(found, default=-1) >= len(names):
                raise CodecError(f"request_ids must name ids from 0 to {len(names) - 1}")
            request_ids = list(map(names.__getitem__, found))
        count = len(request_ids)
        rows = RowColumns(
            request_ids,
            UINT32S.unpack(computed, "num_computed_tokens", count),
            UINT32S.unpack(scheduled, "num_scheduled_tokens", count),
            _unpack_sparse(block_ids, count, "new_block_ids"),
            _unpack_sparse(draft_ids, count, "draft_token_ids"),
        )
        state = PHASES.unpack(phases, "phases"), STATS.unpack(stats, "stats")
        record = StepRecord(_TIME.unpack(start_s, "start_s"), *state, rows)
        if work is not None:
            record = record._replace(encoder_work=ENCODER_WORK.unpack(work, "encoder_work"))
        steps.append(record if media is None else record._replace(media=_MEDIA.unpack(media, "media")))
    return steps


def _draw_steps(pick: Random) -> list[StepRecord]:
    """Where nothing was encoded, that is the default, as after an arrival."""
    drawn = [
        StepRecord(0.5, *(kind.draw(pick) for kind in (PHASES, STATS, ROWS, ENCODER_WORK, _MEDIA)))
        for _ in range(pick.randrange(3))
    ]
    return [step._replace(encoder_work=step.encoder_work or ()) for step in drawn]


RECENT_STEPS: Final = row(
    StepRecording,
    {
        "now_s": _TIME,
        "steps": Kind(_unpack_steps, _draw_steps, _pack_steps),
        "events": EVENTS,
        "tenants": mapping(items(tuple_of(_KEY, text(MAX_TENANT_LENGTH)))),
        "notes": mapping(items(tuple_of(_KEY, _NOTE))),
    },
)
