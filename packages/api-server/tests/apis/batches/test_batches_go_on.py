"""Batches of several keys beside each other, and what one of them does to the others."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from server_helpers.batches import line, server
from server_helpers.waiting import wait_until

from llmstack_server.apis.batches import batch_run, worker
from llmstack_server.apis.batches.table import SCHEMA, BatchTable
from llmstack_server.options.http_options import BatchConfig

KEYS = ("key of the first", "key of the second")
ONE_PLACE = BatchConfig(max_concurrency=1)


def answers_in(folder: Path, batch: dict[str, Any]) -> int:
    work = folder / "files" / f"{batch['id']}.work"
    return work.read_bytes().count(b"\n") if work.exists() else 0


async def test_a_short_batch_does_not_wait_for_the_long_ones_of_another_key(tmp_path: Path):
    folder = tmp_path / "state"
    lines = [line(number) for number in range(200)]
    async with server(folder, KEYS, step_delay_s=0.001, batches=ONE_PLACE) as running:
        long = [await running.begin(lines, KEYS[0]) for _ in range(2)]
        await wait_until(lambda: answers_in(folder, long[0]) > 0)
        short = await running.begin([line(1)], KEYS[1])
        assert (await running.ended(short["id"], KEYS[1]))["status"] == "completed"
        assert 0 < sum(answers_in(folder, batch) for batch in long) < 400


async def test_batches_of_one_key_run_at_the_same_time(tmp_path: Path):
    folder = tmp_path / "state"
    async with server(folder, step_delay_s=0.01, batches=ONE_PLACE) as running:
        batches = [await running.begin([line(number) for number in range(50)]) for _ in range(3)]
        await wait_until(lambda: all(answers_in(folder, batch) > 0 for batch in batches))
        assert all(answers_in(folder, batch) < 50 for batch in batches)


@pytest.mark.parametrize("runs_on", [False, True], ids=["while a server runs", "while none does"])
async def test_a_deleted_input_ends_its_batch_alone(tmp_path: Path, runs_on: bool):
    folder = tmp_path / "state"
    lines = [line(number) for number in range(40)]
    async with server(folder, KEYS, step_delay_s=0.01, batches=BatchConfig(max_concurrency=2)) as running:
        batch, other = await running.begin(lines, KEYS[0]), await running.begin(lines, KEYS[1])
        await wait_until(lambda: answers_in(folder, batch) > 2 and answers_in(folder, other) > 2)
        deleted = await running.call("DELETE", f"/v1/files/{batch['input_file_id']}", key=KEYS[0])
        assert deleted.status == 200
    num_before = answers_in(folder, batch)
    async with server(folder, KEYS, begins=False) as running:
        if runs_on:  # a folder whose row is left, but not its file
            (folder / "files" / batch["input_file_id"]).unlink(missing_ok=True)
    async with server(folder, KEYS) as running:
        assert (await running.ended(other["id"], KEYS[1]))["request_counts"]["completed"] == 40
        ended = await running.ended(batch["id"], KEYS[0])
        assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "input_file_not_found")
        assert len(await running.lines(ended["output_file_id"], KEYS[0])) == num_before


async def test_an_expired_batch_without_its_input_has_the_answers_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch_run, "POLL_S", 0.01)
    folder = tmp_path / "state"
    async with server(folder, step_delay_s=0.01, batches=ONE_PLACE) as running:
        batch = await running.begin([line(number) for number in range(50)])
        await wait_until(lambda: answers_in(folder, batch) > 0)
        await running.call("DELETE", f"/v1/files/{batch['input_file_id']}")
        monkeypatch.setattr(batch_run.time, "time", lambda: batch["expires_at"])
        ended = await running.ended(batch["id"])
        assert (ended["status"], ended["error_file_id"]) == ("expired", None)
        assert ended["request_counts"]["completed"] == len(await running.lines(ended["output_file_id"]))


async def test_a_line_that_is_costly_to_read_fails_its_batch_alone(tmp_path: Path):
    costly = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"x":[' + b"[]," * 1_300_000 + b"[]]}}"
    async with server(tmp_path / "state", KEYS) as running:
        file = (await running.upload(costly, KEYS[0])).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await running.call("POST", "/v1/batches", body, KEYS[0])).json()
        other = await running.begin([line(1)], KEYS[1])
        assert (await running.ended(other["id"], KEYS[1]))["status"] == "completed"
        (error,) = (await running.ended(batch["id"], KEYS[0]))["errors"]["data"]
        assert (error["code"], error["line"]) == ("invalid_json_line", 1)
        assert "more than 65536 arrays, objects and members" in error["message"]


def marked(folder: Path) -> list[str]:
    with sqlite3.connect(folder / "batches.sqlite3") as connection:
        return [row[0] for row in connection.execute("SELECT id FROM batches WHERE is_read")]


async def test_a_batch_is_marked_while_its_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, seen = tmp_path / "state", []
    read = batch_run.line_steps

    def noting(*arguments: Any) -> Any:
        for item in read(*arguments):
            seen.append(marked(folder))
            yield item

    monkeypatch.setattr(batch_run, "line_steps", noting)
    async with server(folder) as running:
        batches = [await running.begin([line(number) for number in range(5)]) for _ in range(2)]
        for batch in batches:
            await running.ended(batch["id"])
    assert {len(ids) for ids in seen} == {1}
    assert {one for ids in seen for one in ids} == {batch["id"] for batch in batches}
    assert marked(folder) == []


async def test_a_batch_that_ends_every_process_which_reads_it_is_given_up(tmp_path: Path):
    folder = tmp_path / "state"
    async with server(folder, begins=False) as running:
        batch, other = await running.begin([line(1)]), await running.begin([line(1)])
    for _ in range(worker.MAX_ATTEMPTS):
        table = BatchTable(folder / "batches.sqlite3")
        table.count_interrupted(0, 1)
        table.note_reading(batch["id"], True)  # and then the process ended
        table.close()
    async with server(folder) as running:
        ended = await running.ended(batch["id"])
        assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "request_quarantined")
        assert (await running.ended(other["id"]))["status"] == "completed"


async def test_a_server_that_is_stopped_counts_no_attempt(tmp_path: Path):
    folder = tmp_path / "state"
    async with server(folder, begins=False) as running:
        batch = await running.begin([line(number) for number in range(3)])
    for _ in range(worker.MAX_ATTEMPTS + 1):
        async with server(folder):
            pass
    async with server(folder) as running:
        assert (await running.ended(batch["id"]))["status"] == "completed"


def test_a_table_of_the_release_before_gets_its_new_columns(tmp_path: Path):
    path = tmp_path / "batches.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA application_id = {SCHEMA.application_id}")
        connection.execute("PRAGMA user_version = 1")
        connection.execute(SCHEMA.statements[0])
        connection.execute(
            "CREATE TABLE batches (id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at INTEGER NOT NULL, "
            "process INTEGER NOT NULL, ended INTEGER NOT NULL, data TEXT NOT NULL)"
        )
        data = json.dumps({"id": "b", "status": "in_progress"})
        connection.execute("INSERT INTO batches VALUES ('b', 'a', 1, 0, 0, ?)", (data,))
    connection.close()
    path.chmod(0o600)
    for _ in range(2):
        table = BatchTable(path)
        assert [(one.owner, one.attempts, one.batch["id"]) for one in table.unfinished(0, 1)] == [("a", 0, "b")]
        table.close()
