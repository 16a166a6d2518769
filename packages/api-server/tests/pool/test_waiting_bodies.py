"""Bodies of requests that wait for their models: who leaves frees its place, and what is read is bounded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_helpers.several_models import COMPLETION, Setup, key_header
from server_helpers.waiting import wait_until
from starlette.types import Message

from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.pool.read_ahead import ReadAhead
from llmstack_server.pool.waiting_room import WaitingRoom
from llmstack_server.testing import call

NAME = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nlarge\r\n'
FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF'
END = b"\r\n--x--\r\n"
FORM = {"content-type": "multipart/form-data; boundary=x"}


class Upload:
    """A client that sends a form in pieces, and may leave between two of them."""

    def __init__(self, app: Any, headers: dict[str, str]) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/audio/transcriptions", "raw_path": b"/v1/audio/transcriptions", "query_string": b"",
            "root_path": "", "client": ("test", 1), "server": ("test", 80),
            "headers": [(name.encode(), value.encode()) for name, value in {**FORM, **headers}.items()],
        }  # fmt: skip
        self._app = app

    def send(self, body: bytes, *, is_last: bool = False) -> None:
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": not is_last})

    async def run(self) -> None:
        async def take(message: Message) -> None:
            self.sent.append(message)

        await self._app(self.scope, self.messages.get, take)


def completion(app: Any, prompt: str) -> Upload:
    """A request whose body does not tell its length."""
    upload = Upload(app, {"content-type": "application/json"})
    upload.scope["path"], upload.scope["raw_path"] = "/v1/completions", b"/v1/completions"
    upload.send(json.dumps({**COMPLETION, "model": "large", "prompt": prompt}).encode(), is_last=True)
    return upload


@pytest.fixture
def server() -> Setup:
    made = Setup()
    made.hosts["large"].may_start.clear()
    return made


@pytest.mark.parametrize("length", ["1000", None])
async def test_a_form_whose_client_leaves_frees_its_place(server: Setup, length: str | None):
    model = server.pool.models[1]
    upload = Upload(server.app, {} if length is None else {"content-length": length})
    upload.send(NAME)
    running = asyncio.create_task(upload.run())
    await wait_until(lambda: model.waiting.num_requests == 1)
    upload.send(FILE)
    await asyncio.sleep(0.02)
    assert model.waiting.num_requests == 1
    upload.messages.put_nowait({"type": "http.disconnect"})
    await asyncio.wait_for(running, 5.0)
    assert (model.waiting.num_requests, model.is_used, server.state.in_flight.count) == (0, False, 0)
    assert server.pool.read_ahead.num_requests == 0
    assert upload.sent == []
    server.hosts["large"].may_start.set()  # the load goes on, for the next one
    await wait_until(lambda: model.is_loaded)
    assert server.hosts["large"].num_starts == 1


async def test_a_form_that_was_read_ahead_is_whole(server: Setup):
    upload = Upload(server.app, {})
    upload.send(NAME)
    running = asyncio.create_task(upload.run())
    await wait_until(lambda: server.pool.read_ahead.num_requests == 1)
    upload.send(FILE)
    upload.send(END, is_last=True)
    await asyncio.sleep(0.02)
    server.hosts["large"].may_start.set()
    await asyncio.wait_for(running, 5.0)
    body = b"".join(message.get("body", b"") for message in upload.sent)
    assert b"transcribe" in body, "the model has read all of it"
    assert server.pool.read_ahead.num_requests == 0


async def test_no_more_is_read_ahead_than_allowed():
    messages = [{"type": "http.request", "body": bytes(100), "more_body": True} for _ in range(10)]
    num_received = 0

    async def receive() -> Message:
        nonlocal num_received
        num_received += 1
        return messages[num_received - 1]

    body = ReadAhead(receive)
    reading = asyncio.create_task(body.read_until_gone(250))
    await asyncio.sleep(0.02)
    assert (num_received, reading.done()) == (3, False)
    reading.cancel()
    assert [await body() for _ in range(10)] == messages
    without_room = asyncio.create_task(ReadAhead(receive).read_until_gone(-1))
    await asyncio.sleep(0.02)
    assert num_received == 10
    without_room.cancel()


async def test_without_room_to_read_ahead_a_form_waits_all_the_same(server: Setup):
    server.pool.read_ahead = WaitingRoom(None, 10)
    with server.pool.read_ahead.place("", 10):
        upload = Upload(server.app, {})
        upload.send(NAME)
        upload.send(FILE + END, is_last=True)
        running = asyncio.create_task(upload.run())
        await wait_until(lambda: server.pool.models[1].waiting.num_requests == 1)
        server.hosts["large"].may_start.set()
        await asyncio.wait_for(running, 5.0)
    assert b"transcribe" in b"".join(message.get("body", b"") for message in upload.sent)


async def test_bodies_that_are_read_for_their_model_are_bounded_and_shared_among_keys():
    keys = tuple(Secret(name) for name in ("busy", "quiet"))
    server = Setup(HTTPConfig(api_keys=keys, has_live_page=False, max_body_bytes=1 << 20))
    server.pool.reading = WaitingRoom(None, 4 << 20)
    server.hosts["small"].may_start.set()
    tenant = server.tenant_of("busy")
    body = {**COMPLETION, "model": "small"}
    large = body | {"prompt": "a" * 1_000_000}
    with server.pool.reading.place(tenant, 3_250_000):
        refused = await call(server.app, "POST", "/v1/completions", large, key_header("busy"))
        assert (refused.status, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert (await call(server.app, "POST", "/v1/completions", body, key_header("quiet"))).status == 200
        assert (await server.complete("small", key_header("busy"))).status == 200, "a small one has room"
    assert server.pool.reading.num_requests == 0


async def test_bodies_that_do_not_come_take_no_room(server: Setup):
    server.hosts["small"].may_start.set()
    uploads = [Upload(server.app, {"content-type": "application/json"}) for _ in range(100)]
    for upload in uploads:
        upload.scope["path"], upload.scope["raw_path"] = "/v1/completions", b"/v1/completions"
    running = [asyncio.create_task(upload.run()) for upload in uploads]
    await wait_until(lambda: server.pool.reading.num_requests == 100)
    assert (await server.complete("small")).status == 200
    for upload in uploads:
        upload.messages.put_nowait({"type": "http.disconnect"})
    await asyncio.gather(*running)
    assert server.pool.reading.num_requests == 0


async def test_bodies_that_wait_are_bounded_in_bytes_whatever_length_they_declare(server: Setup):
    server.pool.held = WaitingRoom(None, 300_000)
    waiting = [completion(server.app, "word " * 50_000) for _ in range(2)]
    first = asyncio.create_task(waiting[0].run())
    await wait_until(lambda: server.pool.models[1].waiting.num_requests == 1)
    await asyncio.wait_for(waiting[1].run(), 10.0)
    assert waiting[1].sent[0]["status"] == 503
    server.state.in_flight.cut()
    await first
    assert server.pool.held.num_requests == 0


async def test_pictures_that_wait_count_as_no_text_of_their_length(server: Setup):
    model = server.pool.models[1]
    model.waiting = WaitingRoom(None, 1 << 20)
    waiting = [completion(server.app, "A" * (3 << 20)) for _ in range(3)]
    running = [asyncio.create_task(upload.run()) for upload in waiting]
    await wait_until(lambda: model.waiting.num_requests == 3)
    server.state.in_flight.cut()
    await asyncio.gather(*running)


async def test_files_of_waiting_forms_count_as_no_tokens(server: Setup):
    model = server.pool.models[1]
    model.waiting = WaitingRoom(None, 4 << 20)
    uploads = [Upload(server.app, {"content-length": str(25 << 20)}) for _ in range(3)]
    running = []
    for upload in uploads:
        upload.send(NAME)
        running.append(asyncio.create_task(upload.run()))
    await wait_until(lambda: model.waiting.num_requests == 3)
    for upload in uploads:
        upload.messages.put_nowait({"type": "http.disconnect"})
    await asyncio.wait_for(asyncio.gather(*running), 5.0)
    assert not any(upload.sent for upload in uploads)
