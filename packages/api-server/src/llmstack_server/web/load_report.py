"""The load of the server in the header of an answer, in the form of ORCA."""

from __future__ import annotations

import json
from collections.abc import Awaitable

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from llmstack_server.state.server_state import ServerState

LOAD_FORMAT_HEADER = "endpoint-load-metrics-format"
"""A request with it asks for the load, as `text` or as `json`."""
LOAD_HEADER = "endpoint-load-metrics"


def with_load(state: ServerState, form: str, send: Send) -> Send:
    """A `send` that adds the load when the answer begins; unknown formats add nothing."""
    kind = form.strip().lower()
    if kind not in ("text", "json"):
        return send

    def send_with_load(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            MutableHeaders(raw=message["headers"])[LOAD_HEADER] = _report(state, kind)
        return send(message)

    return send_with_load


def _report(state: ServerState, kind: str) -> str:
    values = state.metrics.load_values()
    if kind == "json":
        return "JSON " + json.dumps({"named_metrics": values})
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())
