"""Middleware that wakes an engine which has fallen asleep without requests."""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llmstack_server.state.idle_sleep import IdleSleep
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import run_until
from llmstack_server.web.clients import current_client
from llmstack_server.web.deadlines import waited_s
from llmstack_server.web.errors import ASLEEP, HTTPError, client_deadline_exceeded, engine_unavailable
from llmstack_server.web.queue_gate import DEADLINE_HEADER, RECEIVED_S, read_deadline


class AwakeMiddleware:
    """Keeps the engine awake while a request is answered, and wakes it first where it sleeps by itself.

    The time until it is awake counts towards the client's deadline, and not towards the limit of the queue.
    """

    def __init__(self, app: ASGIApp, state: ServerState, idle: IdleSleep) -> None:
        self._app = app
        self._state = state
        self._idle = idle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._idle.used(current_client.get().tenant):
            if not self._idle.is_asleep:
                await self._app(scope, receive, send)
                return
            began_s = time.monotonic()
            await self._wake(Headers(scope=scope).get(DEADLINE_HEADER))
            scope["state"][RECEIVED_S] = time.monotonic()
            waited = waited_s.set(waited_s.get() + time.monotonic() - began_s)
            try:
                await self._app(scope, receive, send)
            finally:
                waited_s.reset(waited)

    async def _wake(self, deadline: str | None) -> None:
        """Waits for the engine; the request is in flight meanwhile, so that a drain waits for it or ends it.

        Raises:
            HTTPError: 408, its client's deadline has passed; 503, the engine is gone, or the server stops.
        """
        limit_s = None if deadline is None else read_deadline(deadline)
        left_s = None if limit_s is None else max(limit_s - waited_s.get(), 0.0)
        never = asyncio.get_running_loop().create_future()
        try:
            with self._state.in_flight.track() as cut:
                async with asyncio.timeout(left_s):
                    await run_until(self._idle.wake(), never, cut)
            if self._state.engine.sleep_level:
                raise HTTPError(engine_unavailable(ASLEEP))  # an operator has put it to sleep meanwhile
        except TimeoutError:
            raise HTTPError(client_deadline_exceeded(limit_s or 0.0)) from None
