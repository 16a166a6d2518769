"""First tokens that were predicted, for pages that show them beside the real ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmstack_server.state.shared_table import SharedTable

MAX_KEPT = 2048


@dataclass(slots=True, eq=False)
class KeptPrediction:
    """One request; times in seconds, `changed_s` by the clock of the table."""

    tenant: str
    predicted_s: float
    changed_s: float
    real_s: float | None = None


class RecentPredictions:
    """The last requests of this process that had a predicted first token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._predictions: SharedTable[KeptPrediction] = SharedTable(MAX_KEPT)

    def note(self, request_id: str, tenant: str, predicted_s: float) -> KeptPrediction:
        """A request is submitted now."""
        made = KeptPrediction(tenant, predicted_s, self._clock())
        self._predictions.put(request_id, tenant, made)
        return made

    def note_real(self, prediction: KeptPrediction, real_s: float) -> None:
        """Its first token is there, so long after it was submitted."""
        prediction.real_s, prediction.changed_s = real_s, self._clock()

    def rows(self, max_age_s: float) -> list[list[Any]]:
        """Predictions of the last seconds: tenant, request id, predicted and real milliseconds."""
        since_s = self._clock() - max_age_s
        return [
            [one.tenant, request_id, _ms(one.predicted_s), None if one.real_s is None else _ms(one.real_s)]
            for request_id, one in self._predictions.items()
            if one.changed_s >= since_s
        ]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
