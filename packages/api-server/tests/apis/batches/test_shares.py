"""The share of a key in what is kept, whatever comes at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_helpers.batches import line, server

from llmstack_server.apis.batches.routes import MAX_UNFINISHED
from llmstack_server.apis.batches.storage import FileStore
from llmstack_server.options.http_options import BatchConfig
from llmstack_types import InvalidRequestError

KEYS = ("key of the first", "key of the second")


async def sizes(running: Any, key: str) -> list[int]:
    return [file["bytes"] for file in (await running.call("GET", "/v1/files", key=key)).json()["data"]]


async def test_uploads_at_the_same_time_keep_within_the_share(tmp_path: Path):
    async with server(tmp_path / "state", KEYS, batches=BatchConfig(max_storage_bytes=100), begins=False) as running:
        answers = await asyncio.gather(*(running.upload(b"x" * 40, KEYS[0]) for _ in range(20)))
        assert sorted({answer.status for answer in answers}) == [200, 400]
        codes = {answer.json()["error"]["code"] for answer in answers if answer.status != 200}
        assert codes == {"file_quota_exceeded"}
        kept = await sizes(running, KEYS[0])
        assert (sum(kept), len(kept)) == (80, sum(answer.status == 200 for answer in answers))
        assert (await running.upload(b"x" * 100, KEYS[1])).status == 200
        assert len(list((tmp_path / "state/files").iterdir())) == 3
        assert (await running.upload(b"x" * 20, KEYS[0])).status == 200  # what was refused is reserved no longer


async def test_several_processes_keep_within_one_share(tmp_path: Path):
    stores = [FileStore(tmp_path, BatchConfig(max_storage_bytes=100)) for _ in range(3)]

    def keep(store: FileStore) -> bool:
        path, file = store.open_upload()
        file.write(b"x" * 40)
        file.close()
        try:
            store.keep(path, "a", "name", "batch")
        except InvalidRequestError:
            return False
        return True

    kept = await asyncio.gather(*(store.run(lambda store=store: keep(store)) for store in stores * 4))
    assert sum(kept) == 2
    for store in stores:
        await store.close()


async def test_batches_at_the_same_time_keep_within_their_number(tmp_path: Path):
    async with server(tmp_path / "state", begins=False) as running:
        file = (await running.upload(b"x")).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        calls = [running.call("POST", "/v1/batches", body) for _ in range(MAX_UNFINISHED + 10)]
        answers = await asyncio.gather(*calls)
        assert sum(answer.status == 200 for answer in answers) == MAX_UNFINISHED


async def test_answers_that_pass_the_share_end_their_batch_with_those_that_fit(tmp_path: Path):
    lines = [line(number) for number in range(30)]
    async with server(tmp_path / "state", KEYS, batches=BatchConfig(max_storage_bytes=12_000)) as running:
        other = await running.begin(lines[:2], KEYS[1])
        batch = await running.begin(lines, KEYS[0])
        ended = await running.ended(batch["id"], KEYS[0])
        assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "file_quota_exceeded")
        answers = await running.lines(ended["output_file_id"], KEYS[0])
        assert 0 < len(answers) == ended["request_counts"]["completed"] < 30
        assert 11_000 < sum(await sizes(running, KEYS[0])) <= 12_000
        refused = await running.upload(b"x" * 1000, KEYS[0])
        assert refused.json()["error"]["code"] == "file_quota_exceeded"
        assert (await running.ended(other["id"], KEYS[1]))["status"] == "completed"


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["file", "answer", "end", "delete"]), st.integers(0, 60)), max_size=30))
def test_no_order_of_files_and_answers_passes_the_share(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
):
    store = FileStore(tmp_path_factory.mktemp("state"), BatchConfig(max_storage_bytes=100))
    table, files = store.table, []
    table.add_batch({"id": "b", "created_at": 1, "status": "in_progress"}, "a", 0, 10, 10)
    for kind, number in steps:
        path, file = store.open_upload()
        file.write(b"x" * number)
        file.close()
        try:
            if kind == "file":
                files.append(store.keep(path, "a", "name", "batch").id)
        except InvalidRequestError:
            assert table.usage("a")[1] + number > 100
        if kind == "answer":
            assert table.add_work_bytes("b", "a", number, 100) or table.usage("a")[1] + number > 100
        if kind == "end":
            table.set_work_bytes("b", 0)
        if kind == "delete" and files:
            store.delete(files.pop())
        path.unlink(missing_ok=True)
        assert table.usage("a")[1] <= 100
        assert table.usage("a")[0] == len(files)
    table.close()
