"""Bodies: their limits of size and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.state.turns import Turns
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.web import body as body_module
from llmstack_server.web.body import BodyLimits, ClientDisconnected, discard_body, read_body, read_json_object
from llmstack_server.web.errors import HTTPError
from llmstack_server.web.json_pieces import PIECE_BYTES

Receive = Callable[[], Awaitable[dict[str, Any]]]


def receiver(chunks: list[bytes], *, is_endless: bool = False) -> tuple[Receive, list[int]]:
    taken = [0]

    async def receive() -> dict[str, Any]:
        if taken[0] == len(chunks):
            if is_endless:
                await asyncio.sleep(60)
            return {"type": "http.disconnect"}
        taken[0] += 1
        more = is_endless or taken[0] < len(chunks)
        return {"type": "http.request", "body": chunks[taken[0] - 1], "more_body": more}

    return receive, taken


async def test_chunks_are_joined():
    receive, _ = receiver([b"ab", b"", b"c"])
    assert await read_body({}, receive, BodyLimits(3)) == b"abc"


@pytest.mark.parametrize("length", ["5", "99999999999999999999999"])
async def test_a_declared_length_over_the_limit_is_refused_unread(length: str):
    receive, taken = receiver([b"abcde"])
    with pytest.raises(HTTPError) as caught:
        await read_body({"content-length": length}, receive, BodyLimits(4))
    assert (caught.value.answer.status, taken[0]) == (413, 0)


async def test_undeclared_bytes_are_counted():
    receive, taken = receiver([b"abc"] * 100)
    with pytest.raises(HTTPError) as caught:
        await read_body({}, receive, BodyLimits(7))
    assert (caught.value.answer.status, taken[0]) == (413, 3)


async def test_a_larger_limit_of_bytes_permits_larger_structures():
    headers = {"content-type": "application/json"}
    body = b'{"a":[' + b"[]," * 100_000 + b"[]]}"
    receive, _ = receiver([body])
    with pytest.raises(HTTPError, match="65536 arrays, objects and members"):
        await read_json_object(headers, receive, BodyLimits(4 << 20), Turns())
    receive, _ = receiver([body])
    assert len((await read_json_object(headers, receive, BodyLimits(8 << 20), Turns()))["a"]) == 100_001


async def test_a_body_that_does_not_come_in_time_is_refused():
    receive, _ = receiver([b"ab"], is_endless=True)
    with pytest.raises(HTTPError) as caught:
        await read_body({"content-length": "118"}, receive, BodyLimits(1000, timeout_s=0.02))
    assert (caught.value.answer.status, caught.value.answer.code) == (408, "request_timeout")


async def test_a_client_that_leaves_while_sending_is_noticed():
    receive, _ = receiver([])
    with pytest.raises(ClientDisconnected):
        await read_body({}, receive, BodyLimits())


async def test_discarding_ends_with_the_body():
    receive, taken = receiver([b"ab", b"c"])
    await discard_body(receive)
    assert taken[0] == 2


@pytest.mark.parametrize("limit", ["LINGER_BYTES", "LINGER_S", "_LINGER_SILENT_S"])
async def test_discarding_ends_where_the_body_does_not(monkeypatch: pytest.MonkeyPatch, limit: str):
    monkeypatch.setattr(body_module, limit, {"LINGER_BYTES": 8}.get(limit, 0.05))
    is_silent = limit == "_LINGER_SILENT_S"

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60 if is_silent else 0)
        return {"type": "http.request", "body": b"a", "more_body": True}

    await asyncio.wait_for(discard_body(receive), 5)


async def test_a_refused_body_is_answered_before_the_rest_is_discarded():
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(max_body_bytes=10)))
    answer = await call(app, "POST", "/v1/completions", {"prompt": "x" * 100})
    assert (answer.status, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert answer.headers["connection"] == "close"
    assert int(answer.headers["content-length"]) == len(answer.body)


@pytest.mark.parametrize(("max_body_bytes", "status"), [(4 << 20, 413), (8 << 20, 200)])
async def test_a_body_may_be_as_large_as_the_limit_says(max_body_bytes: int, status: int):
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(max_body_bytes=max_body_bytes)))
    body = {"prompt": "x", "max_tokens": 1, "metadata": "x" * (5 << 20)}
    assert (await call(app, "POST", "/v1/completions", body)).status == status


async def test_the_path_is_checked_before_the_size():
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(max_body_bytes=10)))
    assert (await call(app, "POST", "/nowhere", {"prompt": "x" * 100})).status == 404


async def test_other_work_is_done_between_the_pieces_of_a_large_body():
    body = json.dumps({"prompt": list(range(100_000, 200_000))}).encode()
    pending = [{"type": "http.request", "body": body, "more_body": False}]
    num_ticks = 0

    async def receive() -> Any:
        return pending.pop()

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            num_ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    found = await read_json_object({"content-type": "application/json"}, receive, BodyLimits(), Turns())
    ticking.cancel()
    assert found == json.loads(body)
    assert num_ticks >= len(body) // PIECE_BYTES


async def test_the_turn_of_a_large_body_that_is_refused_is_passed_on():
    turns = Turns()
    for body in (b'{"a":[' + b"1," * PIECE_BYTES + b"]}", b'{"a":[' + b"1," * PIECE_BYTES + b"1]}"):
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive(pending: list[Any] = pending) -> Any:
            return pending.pop()

        reading = read_json_object({"content-type": "application/json"}, receive, BodyLimits(), turns)
        if body.endswith(b",]}"):
            with pytest.raises(HTTPError):
                await reading
        else:
            assert len((await reading)["a"]) == PIECE_BYTES + 1
