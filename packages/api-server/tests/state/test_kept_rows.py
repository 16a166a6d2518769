"""Kept answers in a database: what was written is read again, and a file that cannot be used is a sentence."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_server.apis.responses.response_table import database_path
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.kept_rows import Change, KeptAnswer, KeptRows, Written
from llmstack_server.testing import FakeEngineClient, ready_state

PARTS = st.lists(st.binary(max_size=4), max_size=3)
# Of one answer: its id, new parts, numbers of new cuts, and whether it ends, or goes.
STEPS = st.lists(st.tuples(st.sampled_from("abc"), PARTS, st.integers(0, 2), st.sampled_from(["", "ends", "goes"])))


@settings(max_examples=25, deadline=None)  # each one makes files
@given(STEPS, st.booleans())
def test_what_was_written_is_read_again(steps: list[tuple[str, list[bytes], int, str]], is_adopted: bool):
    kept: dict[str, tuple[KeptAnswer, list[bytes], bytes]] = {}
    written: dict[str, Written] = {}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rows.sqlite3"
        rows = KeptRows(path)
        for number, (answer_id, parts, num_cuts, end) in enumerate(steps):
            if end == "goes":
                rows.write([Change(answer_id)], number)
                kept.pop(answer_id, None)
                written.pop(answer_id, None)
                continue
            before = kept.get(answer_id)
            cuts = (b"" if before is None else before[2]) + bytes([number % 256]) * 4 * num_cuts
            is_over = bool(end) or (before is not None and before[0].ended_at is not None)  # an end is for ever
            answer = KeptAnswer(
                answer_id, "owner", {"step": number}, b"data", float(number) if is_over else None,
                parts=parts, inputs=[b"in"], outputs=[b"out"] if end else [], source=AnswerSource([number], cuts),
            )  # fmt: skip
            change = Change(answer_id, answer, written.get(answer_id))
            rows.write([change], number)
            assert change.written is not None
            written[answer_id] = change.written
            kept[answer_id] = answer, ([] if before is None else before[1]) + parts, cuts
        if is_adopted:
            rows.close()
            rows = KeptRows(Path(name) / "other.sqlite3")
            rows.adopt(path)
        found = rows.load(lambda answer: answer)
        rows.close()
    assert [one.ended_at for one in found] == sorted(
        [one.ended_at for one in found], key=lambda at: float("inf") if at is None else at
    )
    assert {one.id for one in found} == set(kept)
    for one in found:
        answer, parts, cuts = kept[one.id]
        assert (one.facts, one.data, one.ended_at, one.parts) == (answer.facts, b"data", answer.ended_at, parts)
        assert (one.inputs, one.written_at) == ([b"in"], answer.facts["step"])
        assert one.source is not None
        assert one.source.values == [answer.facts["step"]]
        assert one.source.cuts_after(0) == (b"" if answer.ended_at is not None else cuts)


def execute(path: Path, statement: str) -> None:
    """Leaves no connection: a forgotten one locks the file until garbage is collected."""
    with closing(sqlite3.connect(path, isolation_level=None)) as table:
        table.execute(statement)


def make_foreign(path: Path) -> None:
    execute(path, "CREATE TABLE recipes (title TEXT)")


def make_of(path: Path, version: int) -> None:
    KeptRows(path).close()
    execute(path, f"PRAGMA user_version = {version}")


def make_torn(path: Path) -> None:
    KeptRows(path).close()
    path.write_bytes(path.read_bytes()[:4096] + b"x" * 8192)


def make_odd(path: Path) -> None:
    KeptRows(path).close()
    execute(path, "INSERT INTO answers VALUES (1, '', 1.0, 1.0, 'text', 'text')")


FAULTS = [
    (make_foreign, "is a database of another program"),
    (partial(make_of, version=99), "later release of llmstack"),
    (partial(make_of, version=1), "earlier release of llmstack"),
    (make_torn, "is damaged"),
    (make_odd, "is damaged"),
    (
        lambda path: path.write_bytes(b"not a database, but long enough to be looked at" * 99),
        "is damaged or no database",
    ),
    (lambda path: path.mkdir(), "is no regular file"),
    (lambda path: path.touch(0o644), "permissions must be 600"),
]


@pytest.mark.parametrize(("make", "sentence"), FAULTS)
def test_a_database_that_cannot_be_used_is_a_sentence(make: Any, sentence: str, tmp_path: Path):
    path = database_path(tmp_path, 0)
    make(path)
    if path.is_file() and make is not FAULTS[-1][0]:
        path.chmod(0o600)
    with pytest.raises(ServeError, match=sentence) as caught:
        build_app(ready_state(FakeEngineClient(), HTTPConfig(state_dir=str(tmp_path))))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
