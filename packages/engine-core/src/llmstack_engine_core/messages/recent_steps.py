"""Declaration of `StepRecording`.

Each request id travels once: a page that follows 256 requests reads thousands of rows per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final

from llmstack_engine_core.messages.kinds import UINT32S, CodecError, Kind, list_of, lists, number, text
from llmstack_engine_core.messages.outputs import EVENTS, PHASES, REQUEST_IDS, STATS
from llmstack_engine_core.messages.requests import MAX_LORA_NAME_LENGTH, MAX_REQUEST_ID_LENGTH, MAX_TENANT_LENGTH
from llmstack_engine_core.messages.rows import mapping, row
from llmstack_engine_core.messages.steps import ROWS
from llmstack_engine_core.row_columns import RowColumns
from llmstack_types import RequestNote, StepRecord, StepRecording

_TIME: Final = number()
_LISTS: Final = lists(UINT32S)
_KEY: Final = text(MAX_REQUEST_ID_LENGTH)


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
            self._packed = UINT32S.pack([known[request_id] for request_id in request_ids], "request_ids")
        return self._packed


class _GivenNames:
    """The request ids of a message that is read: the inverse of `_Names`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._packed: object = b""
        self._last: list[str] = []

    def unpack(self, packed: Any) -> list[str]:
        """The ids at indexes. Steps one after the other with the same rows get one list."""
        if packed != self._packed:
            indexes = UINT32S.unpack(packed, "request_ids")
            if max(indexes, default=-1) >= len(self._names):
                raise CodecError(f"request_ids must name ids from 0 to {len(self._names) - 1}")
            self._packed, self._last = packed, list(map(self._names.__getitem__, indexes))
        return self._last


def _pack_rows(columns: RowColumns, names: _Names) -> list[Any]:
    return [
        names.pack(columns.request_ids),
        UINT32S.pack(columns.num_computed_tokens, "num_computed_tokens"),
        UINT32S.pack(columns.num_scheduled_tokens, "num_scheduled_tokens"),
        _pack_sparse(columns.new_block_ids, "new_block_ids"),
        _pack_sparse(columns.draft_token_ids, "draft_token_ids"),
    ]


def _unpack_rows(value: Any, names: _GivenNames) -> RowColumns:
    indexes, computed, scheduled, block_ids, draft_ids = list_of(value, "rows", 5)
    request_ids = names.unpack(indexes)
    num_rows = len(request_ids)
    return RowColumns(
        request_ids,
        UINT32S.unpack(computed, "num_computed_tokens", num_rows),
        UINT32S.unpack(scheduled, "num_scheduled_tokens", num_rows),
        _unpack_sparse(block_ids, num_rows, "new_block_ids"),
        _unpack_sparse(draft_ids, num_rows, "draft_token_ids"),
    )


def _pack_sparse(index_to_values: Mapping[int, Sequence[int]], name: str) -> list[Any] | None:
    """Row numbers, and the values of these rows."""
    if not index_to_values:
        return None
    return [UINT32S.pack([*index_to_values], name), _LISTS.pack([*index_to_values.values()], name)]


def _unpack_sparse(value: Any, num_rows: int, name: str) -> dict[int, list[int]]:
    if value is None:
        return {}
    packed_indexes, packed_lists = list_of(value, name, 2)
    indexes = UINT32S.unpack(packed_indexes, name)
    if max(indexes, default=-1) >= num_rows:
        raise CodecError(f"{name} must name rows from 0 to {num_rows - 1}")
    return dict(zip(indexes, _LISTS.unpack(packed_lists, name, len(indexes)), strict=True))


def _unpack_step(value: Any, names: _GivenNames) -> StepRecord:
    start_s, phases, stats, rows = list_of(value, "step", 4)
    return StepRecord(
        _TIME.unpack(start_s, "start_s"), PHASES.unpack(phases, "phases"), STATS.unpack(stats, "stats"),
        _unpack_rows(rows, names),
    )  # fmt: skip


def _pack_steps(steps: Sequence[StepRecord], name: str) -> list[Any]:
    names = _Names()
    packed = [[step.start_s, step.phases, step.stats, _pack_rows(RowColumns.of(step.rows), names)] for step in steps]
    return [list(names.id_to_index), packed]


def _unpack_steps(value: Any, name: str) -> list[StepRecord]:
    packed_names, steps = list_of(value, name, 2)
    names = _GivenNames(REQUEST_IDS.unpack(packed_names, "request_ids"))
    return [_unpack_step(step, names) for step in list_of(steps, name)]


def _draw_steps(pick: Random) -> list[StepRecord]:
    return [StepRecord(0.5, PHASES.draw(pick), STATS.draw(pick), ROWS.draw(pick)) for _ in range(pick.randrange(3))]


RECENT_STEPS: Final = row(
    StepRecording,
    {
        "now_s": _TIME,
        "steps": Kind(_unpack_steps, _draw_steps, _pack_steps),
        "events": EVENTS,
        "tenants": mapping(_KEY, text(MAX_TENANT_LENGTH)),
        "notes": mapping(
            _KEY, row(RequestNote, {"lora_name": text(MAX_LORA_NAME_LENGTH), "earlier_s": _TIME, "given_s": _TIME})
        ),
    },
)
