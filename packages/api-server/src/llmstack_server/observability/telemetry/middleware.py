"""ASGI middleware that traces a request from its headers to its last byte."""

from __future__ import annotations

import time
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmstack_server.observability.telemetry.request_trace import RequestTrace, current_trace

TRACE_HEADERS = ("traceparent", "tracestate")


class HttpObserver(Protocol):
    """Receives the stages of HTTP requests, on the event loop: it must not block."""

    def on_request(self, trace: RequestTrace) -> None:
        """Called when the headers of a request have arrived."""
        return

    def on_sent(self, trace: RequestTrace, num_bytes: int) -> None:
        """Called when a part of the answer was written to the connection."""
        return

    def on_end(self, trace: RequestTrace, end_s: float) -> None:
        """Called when the answer is complete, or was given up."""
        return


class ObservingMiddleware:
    """Makes a `RequestTrace` for each request and calls the observers."""

    def __init__(self, app: ASGIApp, observers: tuple[HttpObserver, ...]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = _new_trace(scope)
        current_trace.set(trace)
        for observer in self._observers:
            observer.on_request(trace)
        try:
            await self._app(scope, receive, self._noting(trace, send))
        except Exception as error:  # the name of any error is kept, and the error raised again
            trace.error = type(error).__name__
            raise
        finally:
            end_s = time.monotonic()
            for observer in self._observers:
                observer.on_end(trace, end_s)

    def _noting(self, trace: RequestTrace, send: Send) -> Send:
        async def note_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
            await send(message)
            if message["type"] == "http.response.body":
                for observer in self._observers:
                    observer.on_sent(trace, len(message.get("body", b"")))

        return note_and_send


def _new_trace(scope: Scope) -> RequestTrace:
    headers = Headers(scope=scope)
    carried = {name: headers[name] for name in TRACE_HEADERS if name in headers}
    return RequestTrace(scope["state"]["request_id"], scope["method"], scope["path"], time.monotonic(), carried)
