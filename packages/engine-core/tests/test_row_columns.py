"""Rows of a step by columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_core.events import StepRecorder
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.messages.recent_steps import RECENT_STEPS
from llmstack_engine_core.row_columns import RowColumns
from llmstack_types import EngineCoreOutputs, ScheduledRequest, SchedulerStats, StepPhases, StepRecord

counts = st.integers(0, 9)
rows_of_steps = st.lists(
    st.builds(
        ScheduledRequest, st.text("ab-", min_size=1), counts, counts, st.lists(counts, max_size=3),
        st.lists(counts, max_size=2).map(tuple),
    ),
    max_size=5,
)  # fmt: skip


@given(rows_of_steps)
def test_columns_have_the_rows_that_they_were_made_of(rows: list[ScheduledRequest]) -> None:
    columns = RowColumns.of(rows)
    assert list(columns) == rows
    assert columns == rows
    assert (len(columns), columns[:2]) == (len(rows), rows[:2])
    assert RowColumns.of(columns) is columns


def test_the_rows_of_kept_steps_are_not_made_on_their_way_to_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ScheduledRequest("r", 3, 4, [5], (6, 7)), ScheduledRequest("s", 0, 1, [])]
    recorder = StepRecorder()
    recorder.on_step(StepRecord(1.0, StepPhases(0.0, 0.1, 0.0), SchedulerStats(1), rows), EngineCoreOutputs([]))
    with monkeypatch.context() as patched:
        patched.setattr(RowColumns, "__iter__", None)
        patched.setattr(RowColumns, "__getitem__", None)
        sent = RECENT_STEPS.pack(recorder.read(2.0), "recording")
    decoded = RECENT_STEPS.unpack(_as_received(sent), "recording")
    assert [(row.request_id, row.new_block_ids, list(row.draft_token_ids)) for row in decoded.steps[0].rows] == [
        ("r", [5], [6, 7]), ("s", [], []),
    ]  # fmt: skip


@pytest.mark.parametrize("indexes", [False, 0, [], "", {}, b"abc", b"\x01\0\0\0"])
def test_only_bytes_are_indexes_of_request_ids(indexes: object) -> None:
    def received(indexes: object) -> object:
        return _as_received([now_s, [names, [[*times, indexes, b"", b"", *[None] * 4]]], *others])

    recorder, rows = StepRecorder(), [ScheduledRequest("r", 3, 4, [5])]
    recorder.on_step(StepRecord(1.0, StepPhases(0.0, 0.1, 0.0), SchedulerStats(1), rows), EngineCoreOutputs([]))
    now_s, (names, (step,)), *others = RECENT_STEPS.pack(recorder.read(2.0), "recording")
    times = step[:3]
    assert not RECENT_STEPS.unpack(received(b""), "recording").steps[0].rows
    with pytest.raises(CodecError, match="request_ids"):
        RECENT_STEPS.unpack(received(indexes), "recording")


def test_a_step_with_the_rows_of_the_step_before_has_no_ids_of_its_own() -> None:
    recorder = StepRecorder()
    for ids in ("rs", "rs", "s", "rst"):
        rows = [ScheduledRequest(one, 3, 4, [5]) for one in ids]
        recorder.on_step(StepRecord(1.0, StepPhases(0.0, 0.1, 0.0), SchedulerStats(1), rows), EngineCoreOutputs([]))
    sent = _as_received(RECENT_STEPS.pack(recorder.read(2.0), "recording"))
    names, steps = sent[1]  # type: ignore[index]
    assert names == ["r", "s", "t"]
    assert [step[3] is None for step in steps] == [False, True, False, False]
    steps = RECENT_STEPS.unpack(sent, "recording").steps
    assert ["".join(row.request_id for row in step.rows) for step in steps] == ["rs", "rs", "s", "rst"]


def _as_received(value: object) -> object:
    """msgpack makes lists of tuples."""
    return [_as_received(item) for item in value] if isinstance(value, list | tuple) else value
