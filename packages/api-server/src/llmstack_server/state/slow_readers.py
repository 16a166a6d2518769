"""Seconds that streams have waited for their readers, for explanations."""

from __future__ import annotations

from typing import Final

from llmstack_server.state.shared_table import SharedTable

MAX_STREAMS: Final = 1024
# What a healthy connection may take, summed over a stream.
MIN_WAIT_S: Final = 0.05


class SlowReaders:
    """The waits of the last streams whose clients read more slowly than tokens came; others are not kept."""

    def __init__(self) -> None:
        self._waited_s: SharedTable[float] = SharedTable(MAX_STREAMS)

    def note(self, request_id: str, tenant: str, waited_s: float) -> None:
        """Notes at the end of a stream how long its events waited for the client to read."""
        if waited_s < MIN_WAIT_S:
            return
        self._waited_s.put(request_id, tenant, waited_s)

    def waited_s(self, request_id: str) -> float | None:
        """The wait of a request's stream; one of several answers of a request has a number after its id."""
        own = self._waited_s.get(request_id)
        return self._waited_s.get(request_id.rpartition("-")[0]) if own is None else own
