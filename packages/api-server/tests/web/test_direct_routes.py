"""Routes that are found by their exact path, without FastAPI's layers."""

from __future__ import annotations

import pytest
from fastapi import APIRouter, Depends
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llmstack_server.web.direct_routes import DirectRoutes


def routes() -> APIRouter:
    router = APIRouter()

    @router.get("/plain")
    async def plain() -> Response:
        return Response("plain")

    @router.get("/open/{name}")
    async def named(name: str) -> Response:
        return Response(name)

    @router.get("/open/exact")
    async def hidden() -> Response:
        return Response("exact")

    @router.get("/guarded", dependencies=[Depends(lambda: None)])
    async def guarded() -> Response:
        return Response("guarded")

    return router


async def fastapi(scope: Scope, receive: Receive, send: Send) -> None:
    await Response("from FastAPI")(scope, receive, send)


async def answer_to(method: str, path: str, *, root_path: str = "") -> tuple[bytes, object]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    scope: Scope = {"type": "http", "method": method, "path": path, "root_path": root_path}
    await DirectRoutes(fastapi, routes().routes)(scope, receive, send)
    return sent[1]["body"], getattr(scope.get("route"), "path", None)


async def test_a_route_that_needs_nothing_but_its_path_is_called_directly():
    assert await answer_to("GET", "/plain") == (b"plain", "/plain")
    assert await answer_to("GET", "/prefix/plain", root_path="/prefix") == (b"plain", "/plain")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/plain"), ("GET", "/open/a"), ("GET", "/guarded"), ("GET", "/absent")]
)
async def test_fastapi_answers_all_else(method: str, path: str):
    assert await answer_to(method, path) == (b"from FastAPI", None)


async def test_an_earlier_route_that_matches_too_keeps_its_place():
    assert await answer_to("GET", "/open/exact") == (b"from FastAPI", None)


async def test_a_response_sends_without_a_layer_between():
    sends: list[Send] = []

    class Spy(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            sends.append(send)

    router = APIRouter()

    @router.post("/spy")
    async def spy() -> Response:
        return Spy()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    await DirectRoutes(fastapi, router.routes)({"type": "http", "method": "POST", "path": "/spy"}, receive, send)
    assert sends == [send]
