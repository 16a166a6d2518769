"""Refusals of requests by their predicted first token, unread."""

from __future__ import annotations

import time
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llmstack_llm import request_errors
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.clients import current_client
from llmstack_server.web.deadlines import current_deadline, limit_deadline, waited_s
from llmstack_server.web.errors import HTTPError, deadline_unreachable, first_token_too_late, server_is_overloaded
from llmstack_server.web.first_token_check import with_jitter
from llmstack_server.web.form_type import MEDIA_TYPE
from llmstack_server.web.load_report import LOAD_FORMAT_HEADER, with_load
from llmstack_server.web.sessions import current_session, hint_of_header
from llmstack_types import ServerOverloadedError

DEADLINE_HEADER = "x-llmstack-deadline-ms"
MAX_DEADLINE_DIGITS = 9
MIN_RETRY_S = 0.5
# A server that does nothing else needs less to accept a connection and to read it.
READ_AT_ONCE_S = 0.02

RECEIVED_S = "llmstack.received_s"
"""Key of a scope's state: when the last bytes of the headers came, in monotonic seconds."""


class QueueGate:
    """Decides from the key, the headers and the length of a request alone."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._max_ttft_s = state.config.http.max_queue_wait_s

    def check(
        self, num_tokens: int, tenant: str, received_s: float, deadline_s: float | None = None
    ) -> tuple[float | None, float | None]:
        """The predicted wait and first token, in seconds from its headers; None where they are not known.

        Args:
            num_tokens: Its estimated tokens.
            tenant: The tenant of its key.
            received_s: When its headers came. The time since then counts, though no part of the server saw it.
            deadline_s: The time that its client gives it.

        Raises:
            HTTPError: 503, the first token would come too late; with when to retry.
        """
        queue, limit_s = self._state.queue, self._max_ttft_s
        wait_s = queue.predict_wait(num_tokens, tenant)
        if wait_s is None:
            return None, None
        passed_s = max(time.monotonic() - received_s, 0.0)
        ttft_s = wait_s + passed_s
        if ttft_s < READ_AT_ONCE_S and not queue.lateness.unread_s:
            return wait_s, None  # it waits for nothing
        queue.lateness.observe_unread(passed_s)
        if deadline_s is not None and wait_s and ttft_s > deadline_s:
            self._count("deadline", passed_s)
            raise HTTPError(deadline_unreachable(ttft_s, deadline_s, with_jitter(wait_s)))
        if limit_s is None:
            return wait_s, ttft_s
        if wait_s and ttft_s <= limit_s:  # one that does not wait would be answered no sooner if it came again
            ttft_s += queue.seconds_after_wait(num_tokens)
        latest_s = ttft_s + queue.lateness.allowance_s(limit_s, passed_s)
        if latest_s > limit_s:
            self._count("max_queue_wait", passed_s)
            raise HTTPError(first_token_too_late(latest_s, limit_s, with_jitter(max(wait_s, MIN_RETRY_S))))
        return wait_s, ttft_s

    def _count(self, reason: str, passed_s: float) -> None:
        self._state.metrics.count_rejection(reason)
        self._state.metrics.observe_refusal(passed_s)


class QueueGateMiddleware:
    """Refuses what the gate refuses, and counts the rest as waiting. Around routes whose requests wait."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._gate = QueueGate(state)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, queue = Headers(scope=scope), self._state.queue
        if LOAD_FORMAT_HEADER in headers:
            send = with_load(self._state, headers[LOAD_FORMAT_HEADER], send)
        deadline_s = read_deadline(headers[DEADLINE_HEADER]) if DEADLINE_HEADER in headers else None
        num_bytes = content_length(headers, of_text=True)
        client = current_client.get()
        tenant, num_tokens = client.tenant, queue.sizes.estimate(num_bytes)
        received_s = scope["state"].get(RECEIVED_S, time.monotonic())
        if client.is_batch:
            wait_s, ttft_s = queue.predict_wait(num_tokens, tenant), None
        else:
            left_s = None if deadline_s is None else deadline_s - waited_s.get()
            wait_s, ttft_s = self._gate.check(num_tokens, tenant, received_s, left_s)
        ended = current_deadline.set(None)  # what the body gives the request ends with it
        session = current_session.set(hint_of_header(scope))
        try:
            if deadline_s is not None:
                limit_deadline(deadline_s)
            with queue.pending(num_tokens, tenant, num_bytes) as request:
                request.wait_s, request.http_id = wait_s, scope["state"]["request_id"]
                request.expected_s = None if ttft_s is None else received_s + ttft_s
                await self._app(scope, receive, send)
        except ServerOverloadedError as error:
            wait_s = queue.predict_wait(num_tokens, tenant)
            if wait_s is None or error.reason == "tokenization":
                raise
            raise HTTPError(server_is_overloaded(with_jitter(wait_s))) from error
        finally:
            current_deadline.reset(ended)
            current_session.reset(session)


def read_deadline(text: str) -> float:
    """Seconds that the client gives the request, by its header.

    Raises:
        InvalidRequestError: It is no number of milliseconds.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DEADLINE_DIGITS and int(text)):
        reason = "it must be a number of milliseconds, at least 1 and of at most 9 digits"
        raise request_errors.invalid_value(DEADLINE_HEADER, reason)
    return int(text) / 1000


def content_length(headers: Mapping[str, str], *, of_text: bool = False) -> int | None:
    """The length of the body; None where it is not known.

    `of_text`: As text, whose length tells of its tokens; that of a form is not known, since it has a file.
    """
    if of_text and MEDIA_TYPE in headers.get("content-type", "").lower():
        return None
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DEADLINE_DIGITS else None
