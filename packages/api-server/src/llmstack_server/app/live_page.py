"""`GET /live` draws requests over steps, and a stream feeds it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from llmstack_insight.timeline import timeline_page
from llmstack_llm import request_errors
from llmstack_server.app import live_feed
from llmstack_server.app.chat_page import LIVE_PATH, page_response
from llmstack_server.app.live_feed import LiveFeed, Part, Position, report_of
from llmstack_server.app.steps import parse_number
from llmstack_server.state.server_state import ServerState
from llmstack_server.web import sse
from llmstack_server.web.answers import STREAM_HEADERS
from llmstack_server.web.clients import Client, current_client
from llmstack_server.web.errors import HTTPError, answer_to, server_is_overloaded
from llmstack_server.web.routes import Content, Key, Needs, Router, RouteSpec
from llmstack_types import EngineDeadError

# Readers in an API process: operators; all others; and those with one key.
MAX_OPERATORS, MAX_OTHERS, MAX_PER_KEY = 16, 16, 4
KEEP_ALIVE = b": keep-alive\n\n"


def add_live_page(router: Router, state: ServerState) -> None:
    """Adds the page, which needs no key, and its stream, which does. Operators see every request, others their own."""
    readers = _Readers()
    feeds: dict[int, LiveFeed] = {}
    if state.peers is not None:
        state.peers.add_topic(live_feed.TOPIC, lambda age_ms: _answer(state, age_ms))

    @router.declare(RouteSpec(
        "GET HEAD", LIVE_PATH, Content.TEXT, is_documented=False, needs=Needs.NOTHING, key=Key.ASKED_BY_PAGE
    ))  # fmt: skip
    async def live_page(request: Request) -> Response:
        """A document without data: the stream needs the key."""
        return page_response(request, timeline_page(), state.config.http)

    @router.declare(RouteSpec(
        "GET", f"{LIVE_PATH}/events", Content.FILE, is_documented=False, needs=Needs.ENGINE
    ))  # fmt: skip
    async def live_events(request: Request) -> Response:
        """Steps after step `after`, and those that follow, as server-sent events: of engine core `engine`, or of all.

        `core` of an earlier event says which engine core `after` is of. Those of another one are sent from its first.
        For all engine cores, both are lists with commas.
        """
        positions = _positions(request.query_params, len(state.engine.engines))
        client = current_client.get()
        chosen = {feeds.setdefault(index, LiveFeed(state, index)): position for index, position in positions.items()}
        events = _events(state, chosen, None if client.is_operator else client.tenant)
        return _LiveResponse(readers, client, events)


class _LiveResponse(StreamingResponse):
    """Counts as a reader from its first message to its last one."""

    def __init__(self, readers: _Readers, client: Client, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers=STREAM_HEADERS)
        self._readers = readers
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises HTTPError where the client is one reader too many."""
        with self._readers.counted(self._client):
            await super().__call__(scope, receive, send)


class _Readers:
    """Counts the readers: those of one key take no place from others."""

    def __init__(self) -> None:
        self._tenant_to_num: Counter[str | None] = Counter()

    @contextmanager
    def counted(self, client: Client) -> Iterator[None]:
        """The client is a reader within the context. Raises HTTPError where it is one too many."""
        counts, tenant = self._tenant_to_num, None if client.is_operator else client.tenant
        if client.is_operator:
            has_room = counts[None] < MAX_OPERATORS
        else:
            has_room = counts[tenant] < MAX_PER_KEY and counts.total() - counts[None] < MAX_OTHERS
        if not has_room:
            raise HTTPError(server_is_overloaded())
        counts[tenant] += 1
        try:
            yield
        finally:
            counts[tenant] -= 1
            if not counts[tenant]:
                del counts[tenant]


def _positions(params: Mapping[str, str], num_engines: int) -> dict[int, Position]:
    """From where each engine core is read."""
    if "engine" in params:
        index = parse_number("engine", params, max_number=num_engines - 1)
        return {index: Position(params.get("core", ""), parse_number("after", params))}
    steps, cores = params.get("after", "").split(","), params.get("core", "").split(",")
    if max(len(steps), len(cores)) > num_engines:
        raise request_errors.invalid_value("after", f"there are {num_engines} engine cores")
    steps += [""] * (num_engines - len(steps))
    cores += [""] * (num_engines - len(cores))
    numbers = [parse_number("after", {"after": step or "0"}) for step in steps]
    return dict(enumerate(map(Position, cores, numbers)))


async def _events(state: ServerState, feeds: Mapping[LiveFeed, Position], tenant: str | None) -> AsyncIterator[bytes]:
    """Ends when the server drains, and with an error object where the engine is gone."""
    reads: dict[asyncio.Task[Part], LiveFeed] = {
        asyncio.create_task(feed.first_part(position)): feed for feed, position in feeds.items()
    }
    try:
        while reads and not state.lifecycle.is_stopping:
            done, _ = await asyncio.wait(reads, timeout=live_feed.KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield KEEP_ALIVE
            for read in done:
                feed = reads.pop(read)
                try:
                    part = read.result()
                except EngineDeadError as error:
                    if not reads:
                        yield sse.frame(sse.encode_json(answer_to(error, "").body()))
                    continue
                if frame := part.frame(tenant):
                    yield frame
                reads[asyncio.create_task(feed.part_after(part.after))] = feed
    finally:
        for read in reads:
            read.cancel()


async def _answer(state: ServerState, age_ms: str) -> dict[str, object] | None:
    return None if state.opened_engine is None else report_of(state, int(age_ms) / 1000)
