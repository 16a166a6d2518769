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
        """Notes at the end of a stream how long its events waited for the client to read: `MIN_WAIT_S` at least."""
        self._waited_s.put(request_id, tenant, waited_s)

    def waited_s(self, request_id: str) -> float | None:
        """The wait of a request's stream; a completion has a number before its id, one for a prompt after it."""
        number, mark, rest = request_id.partition("_")
        answer_id = rest if mark and number.isdecimal() else request_id
        names = (request_id, answer_id, answer_id.rpartition("-")[0])
        return next((found for name in names if (found := self._waited_s.get(name)) is not None), None)
