"""`--state-dir`: responses that outlive their server, and those of the background that another one finishes."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from server_helpers.waiting import wait_until

from llmstack_server.apis.responses.response_table import database_path
from llmstack_server.apis.responses.saver import ResponseSaver
from llmstack_server.app import build_app
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.state import write_behind
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state
from llmstack_server.web.restarts import MAX_RESUMES

RESPONSES = "/v1/responses"
SECRET = b"s" * 32
SCRIPT = "Once upon a time there was a fox that could not find its way home, since"
FIELDS: dict[str, Any] = {"input": "Hello", "max_output_tokens": 100, "background": True}


@dataclass
class Running:
    """A server in this process, over the fake engine."""

    state: ServerState
    app: Any
    engine: FakeEngineClient

    async def call(self, method: str, path: str = "", body: Any = None, key: str | None = None) -> Answer:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await call(self.app, method, RESPONSES + path, body, headers)

    async def create(self, **fields: Any) -> Any:
        answer = await self.call("POST", "", FIELDS | fields)
        assert answer.status == 200, answer.body
        return answer.json()

    def limit_pages(self, num_pages: int) -> None:
        """A limit on the size of the database, which is met like a full disk."""
        self.saver._rows._connection.execute(f"PRAGMA max_page_count = {num_pages}")

    async def settle(self) -> None:
        """Waits until everything is in the database."""
        await wait_until(lambda: not self.saver._dirty and not self.saver.failure)
        await self.saver.saved()

    @property
    def saver(self) -> ResponseSaver:
        owners = [getattr(end, "__self__", None) for end in self.state.at_end]
        (found,) = [owner for owner in owners if isinstance(owner, ResponseSaver)]
        return found

    async def ended(self, response_id: str, key: str | None = None) -> Any:
        async def look() -> Any:
            found = (await self.call("GET", f"/{response_id}", key=key)).json()
            return None if found["status"] in ("queued", "in_progress") else found

        while (found := await look()) is None:  # noqa: ASYNC110 (over HTTP there is no event to wait for)
            await asyncio.sleep(0.005)
        return found


@asynccontextmanager
async def server(
    folder: Path,
    keys: tuple[str, ...] = (),
    *,
    step_delay_s: float = 0.0,
    contract: str = "",
    script: str = SCRIPT,
    chat: ChatOptions | None = None,
    begins: bool = True,
) -> AsyncIterator[Running]:
    engine = FakeEngineClient(step_delay_s=step_delay_s)
    engine.script = script
    folder.mkdir(mode=0o700, exist_ok=True)  # noqa: ASYNC240 (a test)
    config = HTTPConfig(state_dir=str(folder), api_keys=tuple(map(Secret, keys)))
    state = ready_state(engine, config, chat=chat)
    state.config = replace(state.config, deployment_secret=SECRET)
    assert state.ready is not None
    state.ready = replace(state.ready, numeric_contract_id=contract)
    app = build_app(state)
    for begin in state.at_ready if begins else ():
        begin()
    try:
        yield Running(state, app, engine)
    finally:
        state.in_flight.cut()
        await state.in_flight.wait_until_idle(5)
        for end in state.at_end:
            await end()


def killed(folder: Path, to: Path) -> Path:
    """The folder as a server leaves it that is killed now; nothing is written while this runs."""
    shutil.copytree(folder, to, copy_function=shutil.copyfile)
    to.chmod(0o700)
    for path in to.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return to


def events_in(answer: Answer) -> list[Any]:
    return [json.loads(part.partition("\ndata: ")[2]) for part in answer.body.decode().split("\n\n") if part]


async def test_a_stored_response_is_still_there_for_the_key_that_made_it(tmp_path: Path):
    folder, keys = tmp_path / "state", ("key of the first", "key of the second")
    async with server(folder, keys) as before:
        made = (await before.call("POST", "", FIELDS | {"background": False}, key=keys[0])).json()
        crashed = killed(folder, tmp_path / "killed")
    async with server(crashed, keys) as after:
        found = await after.call("GET", f"/{made['id']}", key=keys[0])
        assert found.json() == made
        foreign, unknown = [
            await after.call("GET", f"/{name}", key=keys[1]) for name in (made["id"], "resp_000" + "0" * 32)
        ]
        assert (foreign.status, foreign.body) == (404, unknown.body)
        items = await after.call("GET", f"/{made['id']}/input_items", key=keys[0])
        assert items.json()["data"][0]["content"][0]["text"] == "Hello"
        fields = {"input": "And?", "previous_response_id": made["id"]}
        assert (await after.call("POST", "", fields, key=keys[0])).status == 200
        assert after.engine.admitted[-1].prompt == f"Hello\n{SCRIPT}\nAnd?"
        assert (await after.call("DELETE", f"/{made['id']}", key=keys[0])).status == 200
        crashed = killed(crashed, tmp_path / "killed again")
    async with server(crashed, keys) as last:
        assert (await last.call("GET", f"/{made['id']}", key=keys[0])).status == 404
    content = b"".join(path.read_bytes() for path in crashed.rglob("*") if path.is_file())
    assert all(key.encode() not in content for key in keys)


async def begun(running: Running, num_events: int, **fields: Any) -> tuple[str, list[Any]]:
    """The id of a response of the background, and the events that its reader saw before it left."""
    body = FIELDS | {"stream": True} | fields
    answer = await call(running.app, "POST", RESPONSES, body, disconnect_after_parts=num_events)
    seen = events_in(answer)
    return seen[0]["response"]["id"], seen


async def test_a_stream_of_the_background_goes_on_in_another_server_where_its_reader_was(tmp_path: Path):
    folder = tmp_path / "state"
    async with server(folder, step_delay_s=0.002) as before:
        response_id, seen = await begun(before, 12, top_logprobs=1)
        crashed = killed(folder, tmp_path / "killed")
        undisturbed = await before.ended(response_id)
    async with server(crashed) as after:
        whole = events_in(await after.call("GET", f"/{response_id}?stream=true"))
        found = await after.ended(response_id)
    assert 12 <= len(seen) < len(whole)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert whole[: len(seen)] == seen
    deltas = [event for event in whole if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == SCRIPT
    assert sum(len(event["logprobs"]) for event in deltas) == len(SCRIPT)
    assert whole[-1]["response"] == found
    assert found | {"completed_at": 0, "output": []} == undisturbed | {"completed_at": 0, "output": []}
    assert found["output"][0]["content"] == undisturbed["output"][0]["content"]
    assert found["output"][0]["id"] == next(event["item_id"] for event in seen if "item_id" in event)


async def test_a_server_that_is_stopped_leaves_the_background_to_the_next_one(tmp_path: Path):
    async with server(tmp_path / "state", step_delay_s=0.002) as before:
        response_id, seen = await begun(before, 8)
        reading = asyncio.create_task(before.call("GET", f"/{response_id}?stream=true"))
        await asyncio.sleep(0)
    cut = events_in(await reading)
    assert (cut[-1]["type"], cut[-1]["code"]) == ("error", "server_shutting_down")
    async with server(tmp_path / "state") as after:
        path = f"/{response_id}?stream=true&starting_after={cut[-1]['sequence_number']}"
        events = events_in(await after.call("GET", path))
        assert events[0]["sequence_number"] == cut[-1]["sequence_number"] + 1
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == SCRIPT
        plain = await after.create()
        assert (await after.ended(plain["id"]))["status"] == "completed"
    texts = [event["delta"] for event in (*cut, *events) if event["type"] == "response.output_text.delta"]
    assert ("".join(texts), cut[: len(seen)]) == (SCRIPT, seen)


async def test_what_the_model_calls_keeps_its_ids(tmp_path: Path):
    call_text = '<tool_call>{"name": "look", "arguments": {"where": "in the forest behind the house"}}</tool_call>'
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    chat = ChatOptions(tool_call_parser="hermes")

    async def fields(running: Running) -> tuple[str, list[Any]]:
        running.engine.script = call_text
        return await begun(running, 9, tools=tools)

    async with server(tmp_path / "state", step_delay_s=0.002, chat=chat) as before:
        response_id, seen = await fields(before)
    added = next(event["item"] for event in seen if event["type"] == "response.output_item.added")
    async with server(tmp_path / "state", chat=chat, script=call_text) as after:
        (item,) = (await after.ended(response_id))["output"]
    assert item == added | {"status": "completed", "arguments": '{"where": "in the forest behind the house"}'}


@pytest.mark.parametrize("cause", ["model", "key", "text", "often"])
async def test_a_response_that_cannot_go_on_fails_and_says_so(cause: str, tmp_path: Path):
    folder, keys = tmp_path / "state", ("one", "two")
    async with server(folder, keys, step_delay_s=0.002) as before:
        body = FIELDS | {"stream": True}
        headers = {"authorization": "Bearer one"}
        answer = await call(before.app, "POST", RESPONSES, body, headers, disconnect_after_parts=9)
        response_id = events_in(answer)[0]["response"]["id"]
    if cause == "often":
        table = sqlite3.connect(database_path(folder, 0))
        table.execute("UPDATE answers SET facts = json_set(facts, '$.request.num_resumes', ?)", (MAX_RESUMES,))
        table.commit()
        table.close()
    script = SCRIPT.upper() if cause == "text" else SCRIPT
    later_keys = ("two", "three") if cause == "key" else keys
    contract = "other weights" if cause == "model" else ""
    async with server(folder, later_keys, contract=contract, script=script) as after:
        await wait_until(lambda: after.state.in_flight.count == 0)
        if cause == "key":
            await after.settle()
        else:
            found = await after.ended(response_id, key="one")
            assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
            events = events_in(await after.call("GET", f"/{response_id}?stream=true", key="one"))
            assert events[-1]["type"] == "response.failed"
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
    async with server(folder, keys) as last:
        found = (await last.call("GET", f"/{response_id}", key="one")).json()
        assert found["status"] == "failed"
        assert last.engine.admitted == []


async def test_one_that_has_not_begun_again_can_be_cancelled(tmp_path: Path):
    async with server(tmp_path / "state", step_delay_s=0.002) as before:
        response_id, _ = await begun(before, 8)
    async with server(tmp_path / "state", begins=False) as after:
        assert (await after.call("GET", f"/{response_id}")).json()["status"] == "queued"
        assert (await after.call("POST", f"/{response_id}/cancel")).json()["status"] == "cancelled"
    async with server(tmp_path / "state") as last:
        assert (await last.call("GET", f"/{response_id}")).json()["status"] == "cancelled"
        assert last.engine.admitted == []


async def test_a_full_disk_refuses_what_it_cannot_keep_until_there_is_room(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(write_behind, "RETRY_S", 0.01)
    async with server(tmp_path / "state") as running:
        kept = await running.create(background=False)
        running.limit_pages(1)
        large = {str(number): "x" * 512 for number in range(16)}
        refused = await running.call("POST", "", FIELDS | {"metadata": large})
        assert (refused.status, refused.json()["error"]["code"]) == (503, "storage_unavailable")
        assert refused.headers["retry-after"] == "1"
        assert (await running.call("POST", "", FIELDS | {"background": False})).status == 503
        assert (await running.call("POST", "", FIELDS | {"background": False, "store": False})).status == 200
        assert (await running.call("GET", f"/{kept['id']}")).json() == kept
        running.limit_pages(100_000)
        await running.settle()
        later = await running.create()
        assert (await running.ended(later["id"]))["status"] == "completed"
        crashed = killed(tmp_path / "state", tmp_path / "killed")
    async with server(crashed) as after:
        assert [(await after.call("GET", f"/{one['id']}")).status for one in (kept, later)] == [200, 200]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_first_response_that_a_full_disk_cannot_keep_is_refused(
    tmp_path: Path, monkeypatch: Any, stream: bool
):
    monkeypatch.setattr(write_behind, "RETRY_S", 0.01)
    fields = FIELDS | {"background": False, "stream": stream, "metadata": {str(n): "x" * 512 for n in range(16)}}
    async with server(tmp_path / "state") as running:
        kept = await running.create(background=False)
        running.limit_pages(1)
        answer = await running.call("POST", "", fields)
        if stream:
            events = events_in(answer)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert [event["type"] for event in events].count("response.completed") == 0
            assert events[-1]["type"] == "response.failed"
            error = events[-1]["response"]["error"]
            response_id = events[-1]["response"]["id"]
            assert (await running.call("GET", f"/{response_id}")).status == 404
        else:
            error = answer.json()["error"]
            assert (answer.status, error["code"]) == (503, "storage_unavailable")
        assert "Responses cannot be stored at the moment: the disk is full." in error["message"]
        num_admitted = len(running.engine.admitted)
        assert (await running.call("POST", "", fields)).status == 503
        assert len(running.engine.admitted) == num_admitted  # nothing is computed for nothing
        await asyncio.sleep(0.05)
        assert running.saver.failure == "the disk is full"  # there is nothing to write, and still no room
        running.limit_pages(100_000)
        await running.settle()
        later = await running.create(background=False)
    async with server(tmp_path / "state") as after:
        assert [(await after.call("GET", f"/{one['id']}")).status for one in (kept, later)] == [200, 200]


@pytest.mark.parametrize("is_moved", [False, True], ids=["removed", "moved"])
async def test_a_lost_folder_is_noticed_and_written_again(tmp_path: Path, monkeypatch: Any, is_moved: bool):
    monkeypatch.setattr(write_behind, "RETRY_S", 0.01)
    folder = tmp_path / "state"
    async with server(folder) as running:
        kept = await running.create(background=False)
        folder.rename(tmp_path / "elsewhere")
        for _ in range(2):
            refused = await running.call("POST", "", FIELDS | {"background": False})
            error = refused.json()["error"]
            assert (refused.status, error["code"]) == (503, "storage_unavailable")
            assert (
                ": the folder of the server is not there. Please retry later, or send 'store': false."
                in error["message"]
            )
        assert (await running.call("POST", "", FIELDS | {"background": False, "store": False})).status == 200
        if is_moved:
            (tmp_path / "elsewhere").rename(folder)
        else:
            folder.mkdir(mode=0o700)
        await running.settle()
        later = await running.create(background=False)
    async with server(folder) as after:
        found = [(await after.call("GET", f"/{one['id']}")).json() for one in (kept, later)]
        assert found == [kept, later]


async def test_a_process_adopts_what_those_kept_that_there_are_no_more(tmp_path: Path):
    async with server(tmp_path / "state") as before:
        made = await before.create(background=False)
    other = made["id"].replace("resp_000", "resp_003")
    with sqlite3.connect(database_path(tmp_path / "state", 0)) as table:
        table.execute("UPDATE answers SET id = ?", (other,))
        table.execute("UPDATE pieces SET answer = ?", (other,))
    table.close()
    database_path(tmp_path / "state", 0).rename(database_path(tmp_path / "state", 3))
    async with server(tmp_path / "state") as after:
        assert (await after.call("GET", f"/{other}")).json()["output"] == made["output"]
    assert [path.name for path in (tmp_path / "state").glob("responses-*")] == [database_path("", 0).name]
