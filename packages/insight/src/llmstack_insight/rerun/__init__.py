"""The requests of a recorded run once more, under other settings.

A cost model takes the place of the model.
"""

from llmstack_insight.rerun.planes import ControlPlane, PlaneError, changed_plane, recorded_plane
from llmstack_insight.rerun.recorded import (
    Outcome,
    RecordedRequest,
    RecordedRequests,
    RunCollector,
    requests_of_log,
)
from llmstack_insight.rerun.rerun import Rerun, fit_to_steps, rerun

__all__ = [
    "ControlPlane",
    "Outcome",
    "PlaneError",
    "RecordedRequest",
    "RecordedRequests",
    "Rerun",
    "RunCollector",
    "changed_plane",
    "fit_to_steps",
    "recorded_plane",
    "requests_of_log",
    "rerun",
]
