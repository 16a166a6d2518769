"""The last requests of an API process, with their predicted first tokens."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

from llmstack_server.state.first_tokens import PendingRequest
from llmstack_server.state.shared_table import SharedTable

MAX_KEPT = 2048
# A completion has a number before the id of its prompt, and a prompt one after that of its answer.
_NUMBERS: Final = re.compile(r"^\d+_|-\d{1,9}$")


def answer_of(request_id: str) -> str:
    """The answer that a request in the engine is a part of."""
    return _NUMBERS.sub("", request_id)


class RecentRequests:
    """The last requests that this process submitted to the engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: The one by which requests are submitted."""
        self._clock = clock
        self._requests: SharedTable[PendingRequest] = SharedTable(MAX_KEPT)

    def note(self, request_id: str, request: PendingRequest) -> None:
        """A request is submitted; its first token is noted in it."""
        request.request_id = request_id
        self._requests.put(request_id, request.tenant, request)

    def named(self, http_id: str, tenant: str | None) -> str | None:
        """The last answer with an `X-Request-Id`, of a tenant or of all; None where none is kept."""
        found = None
        for request_id, one in self._requests.items():
            if one.http_id == http_id and tenant in (None, one.tenant):
                found = answer_of(request_id)
        return found

    def rows(self, max_age_s: float) -> list[list[object]]:
        """Tenant, request id, predicted and real milliseconds of what was submitted or answered in the last seconds."""
        since_s = self._clock() - max_age_s
        return [
            [one.tenant, request_id, _ms(one.prediction.ttft_s), None if one.first_s is None else _ms(one.first_s)]
            for request_id, one in self._requests.items()
            if one.prediction is not None and (one.submitted_s or 0.0) + (one.first_s or 0.0) >= since_s
        ]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
