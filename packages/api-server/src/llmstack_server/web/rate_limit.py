"""Limits per API key: requests per minute, and concurrent requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmstack_server.options.http_options import RateLimits
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.errors import HTTPError, rate_limit_exceeded
from llmstack_server.web.websocket import WEBSOCKET


class MinuteBucket:
    """A token bucket that holds what is allowed in a minute."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._num_allowed = float(limit)
        self._filled_s = clock()

    def take(self) -> float:
        """Takes one request of the limit; without any left, the seconds until there is one."""
        now_s = self._clock()
        self._num_allowed = min(self._limit, self._num_allowed + (now_s - self._filled_s) * self._limit / 60.0)
        self._filled_s = now_s
        if self._num_allowed < 1.0:
            return (1.0 - self._num_allowed) * 60.0 / self._limit
        self._num_allowed -= 1.0
        return 0.0


class KeyLimiter:
    """The usage of one key: its requests of a minute, and those that run."""

    def __init__(self, limits: RateLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        limit = limits.max_requests_per_minute
        self._bucket = None if limit is None else MinuteBucket(limit, clock)
        self.num_running = 0

    def check(self) -> None:
        """Counts one request.

        Raises:
            HTTPError: 429, with the time to wait in its headers.
        """
        self._check_concurrency()
        self._check_rate()

    def _check_concurrency(self) -> None:
        limit = self._limits.max_concurrent_requests
        if limit is not None and self.num_running >= limit:
            raise HTTPError(rate_limit_exceeded(f"At most {limit} requests may run at one time with one API key.", 1.0))

    def _check_rate(self) -> None:
        if self._bucket is not None and (wait_s := self._bucket.take()) > 0:
            limit = self._limits.max_requests_per_minute
            raise HTTPError(rate_limit_exceeded(f"At most {limit} requests per minute with one API key.", wait_s))


class RateLimitMiddleware:
    """Applies the limits to every key. POST requests count, and open WebSockets; requests of a batch do not."""

    def __init__(self, app: ASGIApp, state: ServerState, clock: Callable[[], float] = time.monotonic) -> None:
        limits = state.config.http.rate_limits
        self._app = app
        # One more for requests without a key.
        self._limiters = [KeyLimiter(limits, clock) for _ in range(len(state.config.http.api_keys) + 1)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_counted = scope["type"] == "http" and (scope["method"] == "POST" or WEBSOCKET in scope["state"])
        if not is_counted or "client" in scope["state"]:
            await self._app(scope, receive, send)
            return
        limiter = self._limiters[scope["state"].get("api_key_index", -1)]
        limiter.check()
        place = _Place(limiter)

        async def send_and_leave(message: Message) -> None:
            # Before the last byte: a client that has read it may send the next request at once.
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                place.leave()
            await send(message)

        try:
            await self._app(scope, receive, send_and_leave)
        finally:
            place.leave()


class _Place:
    """One concurrent request of a key."""

    def __init__(self, limiter: KeyLimiter) -> None:
        self._limiter: KeyLimiter | None = limiter
        limiter.num_running += 1

    def leave(self) -> None:
        """Frees the place; a second call has no effect."""
        if self._limiter is not None:
            self._limiter.num_running -= 1
        self._limiter = None
