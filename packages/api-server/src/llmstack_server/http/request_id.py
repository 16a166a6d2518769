"""The `x-request-id` of the request that the running task answers; log lines carry it."""

from __future__ import annotations

from contextvars import ContextVar

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="-")
