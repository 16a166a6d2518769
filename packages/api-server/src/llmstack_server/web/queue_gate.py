"""Middleware that refuses requests by their predicted wait, unread."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llmstack_llm import request_errors
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.clients import current_client
from llmstack_server.web.deadlines import current_deadline, limit_deadline
from llmstack_server.web.errors import HTTPError, deadline_unreachable, server_is_overloaded, wait_too_long
from llmstack_server.web.first_token_check import with_jitter
from llmstack_server.web.load_report import LOAD_FORMAT_HEADER, with_load
from llmstack_server.web.middleware import route_path
from llmstack_types import ServerOverloadedError

DEADLINE_HEADER = "x-llmstack-deadline-ms"
MAX_DEADLINE_DIGITS = 9
# Routes whose requests wait for the engine.
QUEUED_PATHS = frozenset({
    "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses", "/v1/messages",
    "/invocations",
    "/v1/embeddings", "/v2/embed", "/pooling", "/classify",
    "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
})  # fmt: skip


class QueueGateMiddleware:
    """Decides from the key, the headers and the length of a request alone."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._max_wait_s = state.config.http.max_queue_wait_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or route_path(scope) not in QUEUED_PATHS:
            await self._app(scope, receive, send)
            return
        headers, queue = Headers(scope=scope), self._state.queue
        if LOAD_FORMAT_HEADER in headers:
            send = with_load(self._state, headers[LOAD_FORMAT_HEADER], send)
        deadline_s = read_deadline(headers[DEADLINE_HEADER]) if DEADLINE_HEADER in headers else None
        num_bytes = content_length(headers)
        client = current_client.get()
        tenant, num_tokens = client.tenant, queue.estimate_tokens(num_bytes)
        wait_s = queue.predict_wait(num_tokens, tenant)
        if wait_s and not client.is_batch:  # 0: part of the next step
            self._check(wait_s, deadline_s)
        ended = current_deadline.set(None)  # what the body gives the request ends with it
        try:
            if deadline_s is not None:
                limit_deadline(deadline_s)
            with queue.pending(num_tokens, tenant, num_bytes) as request:
                request.wait_s, request.http_id = wait_s, scope["state"]["request_id"]
                await self._app(scope, receive, send)
        except ServerOverloadedError as error:
            wait_s = queue.predict_wait(num_tokens, tenant)
            if wait_s is None or error.reason == "tokenization":
                raise
            raise HTTPError(server_is_overloaded(with_jitter(wait_s))) from error
        finally:
            current_deadline.reset(ended)

    def _check(self, wait_s: float, deadline_s: float | None) -> None:
        """Refuses a request that would wait too long.

        Raises:
            HTTPError: 503, with the predicted wait.
        """
        metrics = self._state.metrics
        if deadline_s is not None and wait_s > deadline_s:
            metrics.count_rejection("deadline")
            raise HTTPError(deadline_unreachable(wait_s, deadline_s, with_jitter(wait_s)))
        if self._max_wait_s is not None and wait_s > self._max_wait_s:
            metrics.count_rejection("max_queue_wait")
            raise HTTPError(wait_too_long(wait_s, self._max_wait_s, with_jitter(wait_s)))


def read_deadline(text: str) -> float:
    """Seconds that the client gives the request, by its header.

    Raises:
        InvalidRequestError: It is no number of milliseconds.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DEADLINE_DIGITS and int(text)):
        reason = "it must be a number of milliseconds, at least 1 and of at most 9 digits"
        raise request_errors.invalid_value(DEADLINE_HEADER, reason)
    return int(text) / 1000


def content_length(headers: Mapping[str, str]) -> int | None:
    """The length of the body; None where it is not known."""
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DEADLINE_DIGITS else None
