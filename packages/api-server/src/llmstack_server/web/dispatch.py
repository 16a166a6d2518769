"""The innermost middleware: refuses what a route cannot answer, and calls it."""

from __future__ import annotations

from operator import itemgetter

from starlette.types import ASGIApp, Receive, Scope, Send

from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import closed_by_operator
from llmstack_server.web.awake import AwakeMiddleware
from llmstack_server.web.clients import check_operator
from llmstack_server.web.errors import ASLEEP, ErrorAnswer, HTTPError, engine_unavailable, server_shutting_down
from llmstack_server.web.origins import OriginGuard
from llmstack_server.web.queue_gate import QueueGateMiddleware
from llmstack_server.web.resumable import RESUMING_HEADERS, ResumableMiddleware
from llmstack_server.web.routes import Needs, RouteSpec, RouteTable, direct_app

_name_of = itemgetter(0)


class EngineGate:
    """Decides whether the engine and the server can do what a route needs."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        processes = state.config.processes
        # The engine core of an attached server may be put to sleep by another one.
        self._can_sleep = processes.has_sleep_mode or processes.is_attached or state.idle is not None

    def refusal(self, spec: RouteSpec) -> ErrorAnswer | None:
        """The answer to requests of a route while it cannot be used."""
        lifecycle, needs = self._state.lifecycle, spec.needs
        if needs is Needs.NOTHING:
            return None
        if not lifecycle.is_ready:
            if lifecycle.is_stopping:
                return server_shutting_down()
            return engine_unavailable(f"The server is not ready yet: {lifecycle.state}.")
        if needs is Needs.SERVICE and (self._state.is_updating_weights or self._state.is_paused):
            return closed_by_operator(self._state)
        if self._can_sleep and needs > Needs.ENGINE and self._state.engine.sleep_level:
            idle = self._state.idle
            if idle is None or not idle.is_asleep:  # what has fallen asleep by itself wakes for the request
                return engine_unavailable(ASLEEP)
        return None


class RouteMiddleware:
    """Refuses requests of foreign pages and those that a route cannot answer now, then calls the route.

    Only routes whose requests wait, or can be resumed, have the middleware for that. Routes that take nothing from
    FastAPI are called without it. FastAPI looks at one route after the other, and answers all else.
    """

    def __init__(self, app: ASGIApp, state: ServerState, table: RouteTable) -> None:
        self._app = app
        self._table = table
        self._guard = OriginGuard(state.config.http)
        self._gate = EngineGate(state)
        self._apps: dict[RouteSpec, ASGIApp] = {}
        self._resumable: dict[RouteSpec, ResumableMiddleware] = {}
        for route, spec in table.routes:
            answer = direct_app(route) or app
            if spec.waits:
                answer = QueueGateMiddleware(answer, state)
            if state.idle is not None and spec.needs > Needs.ENGINE:
                answer = AwakeMiddleware(answer, state, state.idle)
            if spec.is_resumable:
                self._resumable[spec] = ResumableMiddleware(answer, state, stores_answers=spec.stores_answers)
            self._apps.setdefault(spec, answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._guard.check(scope)
        spec = self._table.find(scope)
        if spec is None:  # path and method come first: they get their 404 or 405 in every state
            await self._app(scope, receive, send)
            return
        refusal = self._gate.refusal(spec)
        if refusal is not None:
            raise HTTPError(refusal)
        if spec.is_for_operators:
            check_operator()
        app = self._apps[spec]
        if spec.is_resumable and not RESUMING_HEADERS.isdisjoint(map(_name_of, scope["headers"])):
            app = self._resumable[spec]
        await app(scope, receive, send)
