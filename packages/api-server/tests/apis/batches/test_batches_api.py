"""Files and batches over HTTP: OpenAI's life cycle, private to a key, and going on after a restart."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_helpers.batches import form, line, server
from server_helpers.waiting import wait_until

from llmstack_server.apis.batches import batch_run
from llmstack_server.apis.batches.objects import COMPLETION_WINDOW_S
from llmstack_server.app import build_app
from llmstack_server.options.http_options import BatchConfig, RateLimits
from llmstack_server.testing import FakeEngineClient, call, ready_state


async def test_a_batch_is_answered_and_its_files_say_what_was_and_was_not(tmp_path: Path):
    async with server(tmp_path / "state") as running:
        begun = await running.begin([line(1), line(2, temperature=9), line(3)], metadata={"a": "b"})
        assert (begun["object"], begun["status"], begun["errors"]) == ("batch", "validating", None)
        assert begun["expires_at"] == begun["created_at"] + COMPLETION_WINDOW_S
        batch = await running.ended(begun["id"])
        assert (batch["status"], batch["metadata"]) == ("completed", {"a": "b"})
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        answers = await running.lines(batch["output_file_id"])
        assert {answer["custom_id"] for answer in answers} == {"r1", "r3"}
        assert answers[0]["response"]["body"]["object"] == "chat.completion"
        (refused,) = await running.lines(batch["error_file_id"])
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("r2", 400)
        assert refused["response"]["body"]["error"]["param"] == "temperature"
        output = (await running.call("GET", f"/v1/files/{batch['output_file_id']}")).json()
        assert (output["purpose"], output["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")
        listed = (await running.call("GET", "/v1/batches")).json()
        assert [entry["id"] for entry in listed["data"]] == [batch["id"]]
        assert not list((tmp_path / "state/files").glob("*.work"))


async def test_a_file_is_kept_as_it_is_and_served_as_an_attachment(tmp_path: Path):
    async with server(tmp_path / "state") as running:
        content = b"<script>1</script>\r\n--edg\xff\x00"
        file = (await running.upload(content)).json()
        assert file == {
            "id": file["id"], "object": "file", "bytes": len(content), "created_at": file["created_at"],
            "expires_at": None, "filename": "in.jsonl", "purpose": "batch", "status": "processed",
            "status_details": None,
        }  # fmt: skip
        answer = await running.call("GET", f"/v1/files/{file['id']}/content")
        assert answer.body == content
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"] == 'attachment; filename="in.jsonl"'
        assert "sandbox" in answer.headers["content-security-policy"]
        assert (await running.call("DELETE", f"/v1/files/{file['id']}")).json()["deleted"] is True
        gone = await running.call("GET", f"/v1/files/{file['id']}/content")
        assert (gone.status, gone.json()["error"]["code"]) == (404, "not_found")
        assert not list((tmp_path / "state/files").iterdir())


async def test_files_and_batches_belong_to_the_key_that_made_them(tmp_path: Path):
    keys = ("key of the first", "key of the second")
    limits = RateLimits(max_requests_per_minute=100, max_concurrent_requests=1)
    async with server(tmp_path / "state", keys, rate_limits=limits) as running:
        batch = await running.begin([line(number) for number in range(5)], keys[0])
        ended = await running.ended(batch["id"], keys[0])
        assert ended["request_counts"]["completed"] == 5  # limits of requests over HTTP do not count
        paths = [f"/v1/batches/{batch['id']}", f"/v1/files/{ended['output_file_id']}"]
        for path in [*paths, f"{paths[1]}/content"]:
            foreign = await running.call("GET", path, key=keys[1])
            assert (foreign.status, foreign.json()["error"]["code"]) == (404, "not_found")
        for path, num_own in (("/v1/batches", 1), ("/v1/files", 2)):
            assert len((await running.call("GET", path, key=keys[0])).json()["data"]) == num_own
            assert (await running.call("GET", path, key=keys[1])).json()["data"] == []
        refused = await running.call("POST", f"/v1/batches/{batch['id']}/cancel", key=keys[1])
        assert refused.status == 404
        assert (await running.call("GET", "/v1/files")).json()["error"]["code"] == "missing_api_key"


async def test_a_batch_with_a_wrong_line_fails_before_anything_is_sent(tmp_path: Path):
    async with server(tmp_path / "state") as running:
        wrong = [line(1), line(1), {**line(3), "url": "/v1/completions"}, {"custom_id": "r4"}]
        batch = await running.ended((await running.begin(wrong))["id"])
        assert (batch["status"], batch["output_file_id"]) == ("failed", None)
        assert [(error["code"], error["line"]) for error in batch["errors"]["data"]] == [
            ("duplicate_custom_id", 2), ("mismatched_endpoint", 3), ("invalid_method", 4),
        ]  # fmt: skip
        empty = await running.ended((await running.begin([]))["id"])
        assert empty["errors"]["data"][0]["code"] == "empty_file"


async def test_a_server_that_ends_leaves_the_rest_to_the_next(tmp_path: Path):
    folder = tmp_path / "state"
    lines = [line(number) for number in range(40)]
    async with server(folder, step_delay_s=0.01, batches=BatchConfig(max_concurrency=2)) as running:
        batch = await running.begin(lines)
        work = folder / "files" / f"{batch['id']}.work"
        await wait_until(lambda: work.exists() and work.read_bytes().count(b"\n") >= 4)
    num_before = work.read_bytes().count(b"\n")
    assert 4 <= num_before < 40
    async with server(folder) as running:
        ended = await running.ended(batch["id"])
        assert ended["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        answers = await running.lines(ended["output_file_id"])
        assert sorted(answer["custom_id"] for answer in answers) == sorted(entry["custom_id"] for entry in lines)


async def test_a_cancelled_batch_keeps_the_answers_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_run, "POLL_S", 0.01)
    folder = tmp_path / "state"
    async with server(folder, step_delay_s=0.01, batches=BatchConfig(max_concurrency=1)) as running:
        batch = await running.begin([line(number) for number in range(50)])
        work = folder / "files" / f"{batch['id']}.work"
        await wait_until(lambda: work.exists() and bool(work.read_bytes()))
        cancelled = (await running.call("POST", f"/v1/batches/{batch['id']}/cancel")).json()
        assert cancelled["status"] == "cancelling"
        ended = await running.ended(batch["id"])
        assert ended["status"] == "cancelled"
        assert 0 < ended["request_counts"]["completed"] < 50
        assert len(await running.lines(ended["output_file_id"])) == ended["request_counts"]["completed"]
        again = (await running.call("POST", f"/v1/batches/{batch['id']}/cancel")).json()
        assert again == ended


async def test_after_the_window_the_rest_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_run, "POLL_S", 0.01)
    folder = tmp_path / "state"
    async with server(folder, step_delay_s=0.01, batches=BatchConfig(max_concurrency=1)) as running:
        batch = await running.begin([line(number) for number in range(50)])
        work = folder / "files" / f"{batch['id']}.work"
        await wait_until(lambda: work.exists() and bool(work.read_bytes()))
        later = time.time() + COMPLETION_WINDOW_S
        monkeypatch.setattr(batch_run.time, "time", lambda: later)
        ended = await running.ended(batch["id"])
        counts = ended["request_counts"]
        assert (ended["status"], counts["completed"] + counts["failed"]) == ("expired", 50)
        errors = await running.lines(ended["error_file_id"])
        assert {entry["error"]["code"] for entry in errors} == {"batch_expired"}


async def test_requests_of_a_batch_wait_while_others_are_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with server(tmp_path / "state") as running:
        queue = running.state.queue
        idle = queue.state()
        monkeypatch.setattr(queue, "state", lambda: replace(idle, num_waiting_tokens=5))
        batch = await running.begin([line(1)])
        path = f"/v1/batches/{batch['id']}"
        while (await running.call("GET", path)).json()["status"] != "in_progress":  # noqa: ASYNC110 (over HTTP)
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert (await running.call("GET", f"/v1/batches/{batch['id']}")).json()["status"] == "in_progress"
        monkeypatch.setattr(queue, "state", lambda: idle)
        assert (await running.ended(batch["id"]))["status"] == "completed"


@pytest.mark.parametrize(
    ("content", "fields", "code", "param"),
    [
        (b"x" * 101, {}, "request_too_large", None),
        (b"x", {"purpose": "fine-tune"}, "invalid_value", "purpose"),
        (b"x", {"expires_after[seconds]": "1", "expires_after[anchor]": "created_at"}, "integer_below_min_value",
         "expires_after.seconds"),
        (b"x", {"expires_after[seconds]": "3600"}, "invalid_value", "expires_after.anchor"),
        (b"x", {"note": "y" * 2000}, "string_above_max_length", "note"),
    ],
)  # fmt: skip
async def test_a_wrong_upload_is_refused_and_leaves_nothing(
    tmp_path: Path, content: bytes, fields: dict[str, str], code: str, param: str | None
):
    async with server(tmp_path / "state", batches=BatchConfig(max_file_bytes=100)) as running:
        error = (await running.upload(content, **fields)).json()["error"]
        assert (error["code"], error["param"]) == (code, param)
        assert not list((tmp_path / "state/files").iterdir())


async def test_a_damaged_form_is_refused(tmp_path: Path):
    async with server(tmp_path / "state") as running:
        body, media_type = form(b"x", {"purpose": "batch"})
        cut = await running.call("POST", "/v1/files", body[:-20], **{"content-type": media_type})
        assert (cut.status, cut.json()["error"]["code"]) == (400, "invalid_value")
        json_body = await running.call("POST", "/v1/files", {})
        assert (json_body.status, json_body.json()["error"]["code"]) == (415, "unsupported_media_type")
        no_purpose, media_type = form(b"x", {})
        missing = await running.call("POST", "/v1/files", no_purpose, **{"content-type": media_type})
        assert missing.json()["error"]["param"] == "purpose"
        many = b"".join(b'--edge\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' for _ in range(20))
        too_many = await running.call("POST", "/v1/files", many + body, **{"content-type": media_type})
        assert too_many.status == 400
        assert not list((tmp_path / "state/files").iterdir())


async def test_one_key_can_store_so_much_and_another_one_still_can(tmp_path: Path):
    keys = ("key of the first", "key of the second")
    async with server(tmp_path / "state", keys, batches=BatchConfig(max_storage_bytes=100)) as running:
        assert (await running.upload(b"x" * 80, keys[0])).status == 200
        full = await running.upload(b"x" * 80, keys[0])
        assert (full.status, full.json()["error"]["code"]) == (400, "file_quota_exceeded")
        assert (await running.upload(b"x" * 80, keys[1])).status == 200


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"input_file_id": None}, "missing_required_parameter", "input_file_id"),
        ({"input_file_id": "file-unknown"}, "not_found", "input_file_id"),
        ({"endpoint": "/v1/elsewhere"}, "invalid_value", "endpoint"),
        ({"completion_window": "1h"}, "invalid_value", "completion_window"),
        ({"metadata": {str(number): "" for number in range(17)}}, "object_above_max_properties", "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 10}}, "integer_below_min_value",
         "output_expires_after.seconds"),
    ],
)  # fmt: skip
async def test_a_wrong_batch_is_refused(tmp_path: Path, change: dict[str, Any], code: str, param: str):
    async with server(tmp_path / "state") as running:
        error = (await running.begin([line(1)], **change))["error"]
        assert (error["code"], error["param"]) == (code, param)


@pytest.mark.parametrize("value", [True, None, 5, [], {}, "unknown"])
async def test_a_model_in_the_fields_of_a_batch_is_ignored_as_any_unknown_field(tmp_path: Path, value: Any):
    async with server(tmp_path / "state", begins=False) as running:
        assert (await running.begin([line(1)], model=value))["status"] == "validating"


async def test_lists_have_pages(tmp_path: Path):
    async with server(tmp_path / "state", begins=False) as running:
        ids = [(await running.upload(b"x")).json()["id"] for _ in range(5)]
        first = (await running.call("GET", "/v1/files?limit=2")).json()
        assert [entry["id"] for entry in first["data"]] == ids[:2:-1]
        assert (first["has_more"], first["last_id"]) == (True, ids[3])
        second = (await running.call("GET", f"/v1/files?limit=3&after={ids[3]}")).json()
        assert [entry["id"] for entry in second["data"]] == [ids[2], ids[1], ids[0]]
        assert second["has_more"] is False
        oldest = (await running.call("GET", "/v1/files?order=asc&limit=1&purpose=batch")).json()
        assert oldest["data"][0]["id"] == ids[0]
        assert (await running.call("GET", "/v1/files?purpose=other")).json()["data"] == []
        for query in ("limit=0", "limit=x", "limit=99999", "order=up"):
            assert (await running.call("GET", f"/v1/files?{query}")).status == 400
        for path in ("/v1/files", "/v1/batches"):
            answer = await running.call("GET", f"{path}?after=nothing")
            assert (answer.status, answer.json()["error"]["code"]) == (404, "not_found")


async def test_files_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from llmstack_server.apis.batches import storage, table

    async with server(tmp_path / "state", begins=False) as running:
        lifetime = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = (await running.upload(b"x", **lifetime)).json()
        assert file["expires_at"] == file["created_at"] + 3600
        later = time.time() + 3601
        for module in (table, storage):
            monkeypatch.setattr(module.time, "time", lambda: later)
        assert (await running.call("GET", f"/v1/files/{file['id']}")).status == 404
    async with server(tmp_path / "state") as running:
        await wait_until(lambda: not list((tmp_path / "state/files").iterdir()))


async def test_without_a_folder_there_are_no_such_routes():
    app = build_app(ready_state(FakeEngineClient()))
    for path in ("/v1/files", "/v1/batches"):
        assert (await call(app, "GET", path)).json()["error"]["code"] == "unknown_url"
