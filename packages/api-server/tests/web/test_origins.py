"""Requests that a browser sends for a foreign page, and names that are not this machine's."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.http_options import CORSConfig
from llmstack_server.options.secret import Secret
from llmstack_server.testing import FakeEngineClient, call, ready_state

HOST = {"host": "localhost:8000"}
FOREIGN = {"host": "localhost:8000", "origin": "https://evil.example", "sec-fetch-site": "cross-site"}


def app(**http: Any) -> Any:
    return build_app(ready_state(FakeEngineClient(), HTTPConfig(enable_control_routes=True, **http)))


async def answer_to(server: Any, headers: dict[str, str], method: str = "POST", path: str = "/resume") -> Any:
    return await call(server, method, path, headers=headers)


@pytest.mark.parametrize(
    "headers",
    [
        FOREIGN,
        {**HOST, "origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {**HOST, "origin": "https://evil.example"},
        {**HOST, "origin": "http://localhost:3000"},
        {**HOST, "origin": "null"},
        {**HOST, "sec-fetch-site": "cross-site"},
        {**HOST, "origin": "http://localhost:8000", "sec-fetch-site": "cross-site"},
        {**HOST, "origin": "http://localhost:8000.evil.example"},
    ],
    ids=str,
)
async def test_a_request_from_a_foreign_page_is_refused(headers: dict[str, str]) -> None:
    refused = await answer_to(app(), headers)
    assert (refused.status, refused.json()["error"]["code"]) == (403, "cross_site_request")


@pytest.mark.parametrize(
    "headers",
    [
        HOST,
        {**HOST, "sec-fetch-site": "same-origin", "origin": "http://localhost:8000"},
        {**HOST, "sec-fetch-site": "same-origin", "origin": "https://behind-a-proxy.example"},
        {**HOST, "sec-fetch-site": "none"},
        {**HOST, "origin": "http://localhost:8000"},
        {**HOST, "origin": "HTTP://LOCALHOST:8000"},
    ],
    ids=str,
)
async def test_own_pages_and_programs_may_send_requests(headers: dict[str, str]) -> None:
    assert (await answer_to(app(), headers)).status == 200


@pytest.mark.parametrize(
    ("origins", "status"), [(("https://evil.example",), 200), (("*",), 200), (("https://a",), 403)]
)
async def test_allowed_origins_may_send_requests(origins: tuple[str, ...], status: int) -> None:
    assert (await answer_to(app(cors=CORSConfig(origins=origins)), FOREIGN)).status == status


async def test_every_route_that_changes_state_refuses_foreign_pages() -> None:
    server = app()
    paths = [
        (method.upper(), path.replace("{", "").replace("}", ""))
        for path, methods in server.openapi()["paths"].items()
        for method in methods
        if method not in ("get", "head", "options")
    ]
    assert ("POST", "/pause") in paths
    assert ("POST", "/reset_prefix_cache") in paths
    assert len(paths) > 20
    for method, path in paths:
        assert (await answer_to(server, FOREIGN, method, path)).status == 403, (method, path)


async def test_messages_are_refused_in_the_form_of_their_api() -> None:
    refused = await answer_to(app(), FOREIGN, path="/v1/messages")
    assert (refused.status, refused.json()["type"]) == (403, "error")


async def test_with_keys_the_key_and_cors_decide() -> None:
    server = app(api_keys=(Secret("k"),))
    assert (await answer_to(server, FOREIGN)).status == 401
    assert (await answer_to(server, {**FOREIGN, "authorization": "Bearer k"})).status == 200
    assert (await answer_to(server, {"host": "any.example", "authorization": "Bearer k"})).status == 200


async def test_foreign_pages_may_read_what_is_open_to_all() -> None:
    assert (await answer_to(app(), FOREIGN, "GET", "/health")).status == 200


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("app.localhost:8000", True),
        ("127.0.0.1:8000", True),
        ("127.8.9.1", True),
        ("[::1]:8000", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("notlocalhost", False),
        ("192.168.0.7:8000", False),
        ("[::1", False),
        ("user@evil.example", False),
    ],
)
async def test_a_server_without_keys_on_a_loopback_address_knows_its_names(host: str, is_known: bool) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/resume")):
        answer = await answer_to(app(), {"host": host}, method, path)
        assert answer.status == (200 if is_known else 400)
        if not is_known:
            assert answer.json()["error"]["code"] == "invalid_host"
            assert "--allowed-hosts" in answer.json()["error"]["message"]


async def test_a_name_that_was_accepted_lets_no_other_in() -> None:
    server = app()
    statuses = [(await answer_to(server, {"host": host})).status for host in ("localhost", "evil.example", "localhost")]
    assert statuses == [200, 400, 200]


@pytest.mark.parametrize(
    "http",
    [
        {"cors": CORSConfig(hosts=("llm.example",))},
        {"cors": CORSConfig(hosts=("LLM.example",))},
        {"cors": CORSConfig(hosts=("*",))},
        {"host": "0.0.0.0"},
        {"uds": "/run/llm.sock"},
    ],
    ids=str,
)
async def test_other_names_are_accepted_where_they_are_allowed_or_no_page_can_abuse_them(http: dict[str, Any]) -> None:
    assert (await answer_to(app(**http), {"host": "llm.example:443"})).status == 200
