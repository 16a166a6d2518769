"""Refusals that are written in the call that has read the headers.

They cost no turn of the event loop. Where requests come at many times the capacity, nearly all are refused. Each as a
task, behind all that waits for the loop, would take seconds. What is decided here is only what `QueueGateMiddleware`
would decide as well. All else goes through the application: other errors, other routes, and requests that more than the
gate has to see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from starlette.datastructures import Headers

from llmstack_server.options.http_options import RateLimits
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.clients import EVERYONE, Client
from llmstack_server.web.dispatch import EngineGate
from llmstack_server.web.errors import ErrorAnswer, HTTPError
from llmstack_server.web.load_report import LOAD_FORMAT_HEADER
from llmstack_server.web.middleware import (
    REQUEST_ID_HEADER,
    AuthenticationMiddleware,
    request_id_of,
)
from llmstack_server.web.origins import OriginGuard
from llmstack_server.web.queue_gate import DEADLINE_HEADER, QueueGate, content_length
from llmstack_server.web.resumable import RESUMING_HEADERS
from llmstack_server.web.routes import RouteSpec, RouteTable, route_path

RawHeaders = Sequence[tuple[bytes, bytes]]
EarlyRefusal = Callable[[str, RawHeaders, float], ErrorAnswer | None]

# A request with one of these may get another answer than the refusal, or a further header.
_OTHER_HEADERS = RESUMING_HEADERS | {LOAD_FORMAT_HEADER.encode(), DEADLINE_HEADER.encode(), b"origin"}


def early_refusal(state: ServerState, table: RouteTable) -> EarlyRefusal | None:
    """The check of POST requests by path, headers and their time; None where all need the application.

    Middleware of the operator, telemetry and limits per key have to see refused requests, too.
    """
    http = state.config.http
    if http.middleware or state.telemetry is not None or http.rate_limits != RateLimits():
        return None
    return _EarlyRefusals(state, table).answer


class _EarlyRefusals:
    def __init__(self, state: ServerState, table: RouteTable) -> None:
        self._state = state
        self._path_to_spec = {
            spec.path: spec for _, spec in table.routes if spec.waits and "POST" in spec.methods.split()
        }
        self._root_path = state.config.http.root_path
        self._gate = QueueGate(state)
        self._guard = OriginGuard(state.config.http)
        self._engine_gate = EngineGate(state)
        self._keys = AuthenticationMiddleware(_no_app, state, table) if state.config.http.api_keys else None

    def answer(self, path: str, headers: RawHeaders, received_s: float) -> ErrorAnswer | None:
        queue = self._state.queue
        if not (queue.first_tokens.num_waiting or queue.first_tokens.queued or queue.lateness.unread_s):
            return None  # nothing to wait for
        path = route_path({"path": path, "root_path": self._root_path})
        spec = self._path_to_spec.get(path)
        if spec is None or not _OTHER_HEADERS.isdisjoint([name for name, _ in headers]):
            return None
        known = Headers(raw=list(headers))
        client = self._client(known)
        if client is None or not self._is_own(headers) or self._engine_gate.refusal(spec) is not None:
            return None
        num_tokens = queue.sizes.estimate(content_length(known, of_text=True))
        try:
            self._gate.check(num_tokens, client.tenant, received_s)
        except HTTPError as refusal:
            return self._finished(refusal.answer, spec, request_id_of(known))
        return None

    def _finished(self, answer: ErrorAnswer, spec: RouteSpec, request_id: str) -> ErrorAnswer:
        named = dict.fromkeys((REQUEST_ID_HEADER, *spec.errors.id_headers), request_id)
        answer = spec.errors.answer(answer, request_id)
        self._state.metrics.count_http("POST", spec.path, answer.status, 0.0)
        return replace(answer, headers={**answer.headers, **named})

    def _is_own(self, headers: RawHeaders) -> bool:
        """Whether it comes under a name of this server; a browser's page of another one learns nothing of its load."""
        try:
            self._guard.check({"headers": headers, "method": "POST"})
        except HTTPError:
            return False
        return True

    def _client(self, headers: Headers) -> Client | None:
        if self._keys is None:
            return EVERYONE
        try:
            return self._keys.client_of(headers)
        except HTTPError:
            return None


async def _no_app(*_: object) -> None:
    """Stands behind middleware of which only the decision is asked for."""
