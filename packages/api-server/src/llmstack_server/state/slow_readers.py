"""Seconds that streams have waited for their readers, for explanations."""

from __future__ import annotations

from typing import Final

from llmstack_server.state.recent_requests import answer_of
from llmstack_server.state.shared_table import SharedTable

MAX_STREAMS: Final = 1024
# What a healthy connection may take, summed over a stream.
MIN_WAIT_S: Final = 0.05


class SlowReaders:
    """The waits of the last streams whose clients read more slowly than tokens came; others are not kept."""

    def __init__(self) -> None:
        self._waited_s: SharedTable[float] = SharedTable(MAX_STREAMS)

    def note(self, request_id: str, tenant: str, waited_s: float) -> None:
        """Notes the wait of a stream for its client, at the end of a connection.

        Less than `MIN_WAIT_S` is no wait. Those of several connections to one stream add up.
        """
        if waited_s >= MIN_WAIT_S:
            answer_id = answer_of(request_id)
            self._waited_s.put(answer_id, tenant, waited_s + (self._waited_s.get(answer_id) or 0.0))

    def waited_s(self, request_id: str) -> float | None:
        """The wait of the stream of a request, or of its answer."""
        return self._waited_s.get(answer_of(request_id))
