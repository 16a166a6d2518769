"""First tokens that were predicted, for pages that show them beside the real ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from llmstack_server.state.first_tokens import PendingRequest
from llmstack_server.state.shared_table import SharedTable

MAX_KEPT = 2048


class RecentPredictions:
    """The last requests of this process that had a predicted first token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: The one by which requests are submitted."""
        self._clock = clock
        self._requests: SharedTable[PendingRequest] = SharedTable(MAX_KEPT)

    def note(self, request_id: str, request: PendingRequest) -> None:
        """A request with a prediction is submitted; its first token is noted in it."""
        self._requests.put(request_id, request.tenant, request)

    def rows(self, max_age_s: float) -> list[list[Any]]:
        """Tenant, request id, predicted and real milliseconds of what was submitted or answered in the last seconds."""
        since_s = self._clock() - max_age_s
        return [
            [one.tenant, request_id, _ms(one.prediction.ttft_s), None if one.first_s is None else _ms(one.first_s)]
            for request_id, one in self._requests.items()
            if one.prediction is not None and (one.submitted_s or 0.0) + (one.first_s or 0.0) >= since_s
        ]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
