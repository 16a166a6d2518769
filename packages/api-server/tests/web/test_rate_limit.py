"""Limits of each API key: a bucket of a minute's requests, and a number at one time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from server_helpers.waiting import wait_until

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.http_options import RateLimits
from llmstack_server.options.secret import Secret
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.web.errors import HTTPError
from llmstack_server.web.rate_limit import KeyLimiter, RateLimitMiddleware

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "Hello", "max_tokens": 2}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_minutes_requests_may_come_at_once_and_then_evenly():
    clock = Clock()
    limiter = KeyLimiter(RateLimits(max_requests_per_minute=6), clock)
    for _ in range(6):
        limiter.check()
    with pytest.raises(HTTPError) as caught:
        limiter.check()
    assert caught.value.answer.status == 429
    assert caught.value.answer.headers == {"retry-after": "10", "retry-after-ms": "10000"}
    clock.now_s += 9.9
    with pytest.raises(HTTPError) as caught:
        limiter.check()
    assert int(caught.value.answer.headers["retry-after-ms"]) in range(1, 200)
    clock.now_s += 0.2
    limiter.check()
    clock.now_s += 3600
    for _ in range(6):
        limiter.check()
    with pytest.raises(HTTPError):
        limiter.check()


async def test_keys_are_counted_apart_and_get_only_post_counted():
    http = HTTPConfig(
        api_keys=(Secret("a"), Secret("b")),
        rate_limits=RateLimits(max_requests_per_minute=1, max_concurrent_requests=9),
    )
    app = build_app(ready_state(FakeEngineClient(), http))
    a, b = ({"authorization": f"Bearer {key}"} for key in "ab")
    assert (await call(app, "POST", COMPLETIONS, BODY, a)).status == 200
    refused = await call(app, "POST", COMPLETIONS, BODY, a)
    assert (refused.status, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert (await call(app, "GET", "/v1/models", headers=a)).status == 200
    assert (await call(app, "POST", COMPLETIONS, BODY, b)).status == 200
    assert (await call(app, "POST", COMPLETIONS, BODY, {"authorization": "Bearer c"})).status == 401


async def test_without_keys_all_clients_share_one_allowance():
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(rate_limits=RateLimits(max_requests_per_minute=1))))
    assert [(await call(app, "POST", COMPLETIONS, BODY)).status for _ in range(3)] == [200, 429, 429]


@pytest.mark.parametrize("stream", [False, True])
async def test_concurrent_requests_are_counted_until_they_end(stream: bool):
    engine = FakeEngineClient(step_delay_s=0.01)
    app = build_app(ready_state(engine, HTTPConfig(rate_limits=RateLimits(max_concurrent_requests=2))))
    running = [
        asyncio.create_task(call(app, "POST", COMPLETIONS, {**BODY, "max_tokens": 20, "stream": stream}))
        for _ in range(2)
    ]
    await wait_until(lambda: engine.num_running == 2)
    refused = await call(app, "POST", COMPLETIONS, BODY)
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert [answer.status for answer in await asyncio.gather(*running)] == [200, 200]
    assert (await call(app, "POST", COMPLETIONS, BODY)).status == 200


async def test_a_refused_or_abandoned_request_gives_its_place_back():
    engine = FakeEngineClient()
    app = build_app(ready_state(engine, HTTPConfig(rate_limits=RateLimits(max_concurrent_requests=1))))
    assert (await call(app, "POST", COMPLETIONS, {"prompt": 5})).status == 400
    engine.step_delay_s = 0.2
    await call(app, "POST", COMPLETIONS, BODY, disconnect_after_parts=0)
    engine.step_delay_s = 0.0
    assert (await call(app, "POST", COMPLETIONS, BODY)).status == 200


async def test_a_client_that_has_read_the_last_byte_may_send_the_next_request():
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    async def ask(send: Any) -> None:
        await middleware({"type": "http", "method": "POST", "state": {}}, receive, send)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def ignore(message: Any) -> None:
        pass

    async def ask_meanwhile(message: Any) -> None:
        try:
            await ask(ignore)
        except HTTPError as error:
            answers.append(error.answer.status)
        else:
            answers.append(200)

    answers: list[int] = []
    http = HTTPConfig(rate_limits=RateLimits(max_concurrent_requests=1))
    middleware = RateLimitMiddleware(answer, ready_state(FakeEngineClient(), http))
    await ask(ask_meanwhile)
    assert answers == [429, 429, 200]
    await ask(ignore)  # nothing was given back twice
    answers.clear()
    await ask(ask_meanwhile)
    assert answers == [429, 429, 200]
