"""Kept answers in a database: what was written is read again, and a file that cannot be used is a sentence."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_llm.outputs.request_output import CompletionOutput, RequestOutput
from llmstack_server.apis.responses.response_table import database_path
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.state import kept_rows
from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.kept_rows import MIN_ROW_INTERVAL_S, Change, KeptAnswer, KeptRequest, KeptRows, Written
from llmstack_server.testing import FakeEngineClient, ready_state

REQUEST = KeptRequest("/v1/chat/completions", b"{}", (("content-type", "application/json"),), 3, "contract")
PARTS = st.lists(st.binary(max_size=4), max_size=3)
# Of one answer: its id, new parts, numbers of new cuts, and whether it ends, or goes.
STEPS = st.lists(st.tuples(st.sampled_from("abc"), PARTS, st.integers(0, 2), st.sampled_from(["", "ends", "goes"])))


@settings(max_examples=25, deadline=None)  # each one makes files
@given(STEPS, st.booleans())
def test_what_was_written_is_read_again(steps: list[tuple[str, list[bytes], int, str]], is_adopted: bool):
    kept: dict[str, tuple[KeptAnswer, list[bytes], bytes, bytes]] = {}
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
            num_parts = (0 if before is None else before[0].num_parts) + len(parts)
            kept_cuts = cuts if parts else b"" if before is None else before[3]  # they wait for a part
            stage = number // 2  # of some writes the facts are as before
            is_over = bool(end) or (before is not None and before[0].ended_at is not None)  # an end is for ever
            answer = KeptAnswer(
                answer_id, "owner", {"step": stage}, b"data", float(number) if is_over else None,
                num_parts=num_parts, parts=parts, inputs=[b"in"], outputs=[b"out"] if end else [],
                request=replace(REQUEST, num_resumes=stage), source=AnswerSource([stage], cuts),
            )  # fmt: skip
            change = Change(answer_id, answer, written.get(answer_id), number)
            rows.write([change], number)
            assert change.written is not None
            written[answer_id] = change.written
            kept[answer_id] = answer, ([] if before is None else before[1]) + parts, cuts, kept_cuts
            assert number - change.written.at < MIN_ROW_INTERVAL_S
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
        answer, parts, _, cuts = kept[one.id]
        assert (one.facts, one.data, one.ended_at, one.parts) == (answer.facts, b"data", answer.ended_at, parts)
        assert one.num_parts == len(parts)
        assert (one.inputs, one.written_at) == ([b"in"], written[one.id].at)
        body = b"" if answer.ended_at is not None else REQUEST.body
        assert one.request == replace(REQUEST, body=body, num_resumes=answer.facts["step"])
        assert one.source is not None
        assert one.source.values == [answer.facts["step"]]
        assert one.source.cuts_after(0) == (b"" if answer.ended_at is not None else cuts)


def output_of(token_id: int) -> RequestOutput:
    return RequestOutput("request", "", [1], outputs=[CompletionOutput(0, "x", [token_id])])


def numbers(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_what_processes_have_logged_is_read_by_those_after_them(tmp_path: Path):
    path = tmp_path / "streams.sqlite3"
    opened = [KeptRows(path, is_shared=True, process=process, num_processes=3) for process in range(3)]
    sources = [AnswerSource() for _ in opened]
    for process, rows in enumerate(opened):
        answer_id, written = f"of {process}", None
        for num_parts in (1, 2):
            sources[process].note(output_of(num_parts))
            answer = KeptAnswer(answer_id, "owner", num_parts=num_parts, source=sources[process])
            change = Change(answer_id, answer, written, 1.0)
            rows.write([change], 1.0)
            written = change.written
    assert numbers(path, "log") == 6
    for rows in opened:  # as a kill leaves them
        rows.close()
    first = KeptRows(path, is_shared=True, process=0, num_processes=2)
    assert (numbers(path, "log"), numbers(path, "pieces")) == (2, 2)  # those of the second process wait for it
    found = first.load(lambda answer: answer)
    assert [(one.id, one.num_parts) for one in found] == [(f"of {process}", 2) for process in range(3)]
    assert [one.source and one.source.cuts_after(0) for one in found] == [one.cuts_after(0) for one in sources]
    second = KeptRows(path, is_shared=True, process=1, num_processes=2)
    assert (numbers(path, "log"), numbers(path, "pieces")) == (0, 3)
    assert [one.num_parts for one in second.load(lambda answer: answer)] == [2, 2, 2]
    first.close()
    second.close()


def test_the_log_is_short_and_has_nothing_of_what_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "streams.sqlite3"
    rows = KeptRows(path, is_shared=True)
    source, written = AnswerSource(), dict[str, Written]()

    def write(answer_id: str, num_parts: int, now: float) -> None:
        source.note(output_of(num_parts))
        answer = KeptAnswer(answer_id, "owner", num_parts=num_parts, source=source)
        change = Change(answer_id, answer, written.get(answer_id), now)
        rows.write([change], now)
        assert change.written is not None
        written[answer_id] = change.written

    for num_parts in range(1, 20):
        write("a", num_parts, 5.0 + num_parts)
        assert numbers(path, "log") <= kept_rows.MAX_LOG_AGE_S
    monkeypatch.setattr(kept_rows, "MAX_LOG_BYTES", 0)
    write("a", 20, 24.5)
    assert numbers(path, "log") == 1
    write("b", 1, 24.5)
    rows.write([Change("a")], 24.5)
    assert numbers(path, "log") == 0
    assert [(one.id, one.num_parts) for one in rows.load(lambda answer: answer)] == [("b", 1)]
    rows.close()


def execute(path: Path, statement: str) -> None:
    """Leaves no connection: a forgotten one locks the file until garbage is collected."""
    with closing(sqlite3.connect(path, isolation_level=None)) as table:
        table.execute(statement)


def test_responses_of_the_version_before_are_read_and_its_ended_streams_are_not(tmp_path: Path):
    path, parts = tmp_path / "streams.sqlite3", [b"data: 1", b"data: 2"]
    rows = KeptRows(path)
    for answer_id, facts, ended_at in (("a", {}, 1.0), ("b", {"digest": "0"}, 1.0), ("c", {"digest": "0"}, None)):
        answer = KeptAnswer(answer_id, "owner", facts, b"data", ended_at, num_parts=2, parts=parts)
        rows.write([Change(answer_id, answer, None, 1.0)], 1.0)
    rows.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as table:
        table.execute("UPDATE pieces SET data = ?", (msgpack.packb(parts),))
    execute(path, "PRAGMA user_version = 7")
    rows = KeptRows(path)
    assert [(one.id, one.parts) for one in rows.load(lambda answer: answer)] == [("a", parts), ("c", parts)]
    rows.close()
    assert numbers(path, "pieces") == 2


def make_torn_parts(path: Path) -> None:
    rows = KeptRows(path)
    rows.write([Change("a", KeptAnswer("a", "owner", {}, b"", 1.0, num_parts=1, parts=[b"x"]))], 1.0)
    rows.close()
    execute(path, "UPDATE pieces SET data = substr(data, 1, 5)")


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
    execute(path, "INSERT INTO answers VALUES (1, '', 1.0, 1.0, 'text', 'text', 'text')")


FAULTS = [
    (make_foreign, "is a database of another program"),
    (partial(make_of, version=99), "later release of llmstack"),
    (partial(make_of, version=6), "earlier release of llmstack"),
    (make_torn, "is damaged"),
    (make_odd, "is damaged"),
    (make_torn_parts, "is damaged"),
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
