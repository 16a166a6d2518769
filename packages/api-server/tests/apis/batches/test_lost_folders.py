"""Files and batches while the folder of the server is not there, or its disk is full."""

from __future__ import annotations

import errno
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from server_helpers.batches import SECRET, line, server
from server_helpers.waiting import wait_until

from llmstack_server.apis.batches import worker
from llmstack_server.apis.batches.storage import FileStore

CALLS = [("GET", "/v1/files"), ("GET", "/v1/batches"), ("GET", "/v1/batches/batch_x"), ("GET", "/v1/files/file-x")]
GONE = "Files and batches cannot be stored at the moment: the folder of the server is not there. Please retry later."
FULL = GONE.replace("the folder of the server is not there", "the disk is full")


def remove(folder: Path) -> None:
    """Removes `folder` at once: a writer of the server adds nothing while its entries are removed one by one."""
    shutil.rmtree(folder.rename(folder.with_name("removed")))


async def refusals(running: Any) -> set[tuple[int, str, str]]:
    answers = [await running.call(method, path) for method, path in CALLS]
    answers.append(await running.upload(b"x"))
    errors = [(answer.status, answer.json().get("error", {})) for answer in answers]
    return {(status, error.get("code", ""), error.get("message", "")) for status, error in errors}


async def test_a_removed_folder_is_503_until_there_is_one_again(tmp_path: Path):
    folder = tmp_path / "state"
    async with server(folder) as running:
        assert (await running.upload(b"x")).status == 200
        remove(folder)
        assert await refusals(running) == {(503, "storage_unavailable", GONE)}
        folder.mkdir(mode=0o700)
        assert (await running.call("GET", "/v1/files")).json()["data"] == []
        batch = await running.begin([line(1)])
        assert (await running.ended(batch["id"]))["status"] == "completed"
        assert (folder / "deployment-secret").read_bytes() == SECRET
    async with server(folder, begins=False) as after:
        assert (await after.call("GET", f"/v1/batches/{batch['id']}")).json()["status"] == "completed"


async def test_a_folder_that_was_moved_away_and_back_has_what_it_had(tmp_path: Path):
    folder = tmp_path / "state"
    async with server(folder) as running:
        file = (await running.upload(b"x")).json()
        folder.rename(tmp_path / "elsewhere")
        assert await refusals(running) == {(503, "storage_unavailable", GONE)}
        (tmp_path / "elsewhere").rename(folder)
        assert (await running.call("GET", f"/v1/files/{file['id']}/content")).body == b"x"
        assert (await running.upload(b"y")).status == 200


async def test_a_folder_that_is_open_to_others_is_not_used(tmp_path: Path):
    folder = tmp_path / "state"
    async with server(folder) as running:
        remove(folder)
        folder.mkdir(mode=0o755)
        ((status, code, message),) = await refusals(running)
        assert (status, code) == (503, "storage_unavailable")
        assert "the folder of the server cannot be written" in message
        folder.chmod(0o700)
        assert (await running.upload(b"y")).status == 200


async def test_a_batch_ends_with_its_folder_and_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker, "PAUSE_S", 0.01)
    folder = tmp_path / "state"
    async with server(folder, step_delay_s=0.01) as running:
        lost = await running.begin([line(number) for number in range(200)])
        await wait_until(lambda: (folder / "files" / f"{lost['id']}.work").exists())
        remove(folder)
        assert (await running.call("GET", "/v1/batches")).status == 503
        folder.mkdir(mode=0o700)
        batch = await running.begin([line(1)])
        assert (await running.ended(batch["id"]))["status"] == "completed"
        assert [one["id"] for one in (await running.call("GET", "/v1/batches")).json()["data"]] == [batch["id"]]
        assert len((await running.call("GET", "/v1/files")).json()["data"]) == 2


class FullDisk(io.BytesIO):
    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_full_disk_is_503_and_what_was_written_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    open_upload = FileStore.open_upload

    def opened(store: FileStore) -> tuple[Path, Any]:
        path, file = open_upload(store)
        file.close()
        return path, FullDisk()

    async with server(tmp_path / "state") as running:
        with monkeypatch.context() as full:
            full.setattr(FileStore, "open_upload", opened)
            error = (await running.upload(b"x")).json()["error"]
            assert (error["code"], error["message"]) == ("storage_unavailable", FULL)
        assert not list((tmp_path / "state/files").iterdir())
        assert (await running.upload(b"x")).status == 200
