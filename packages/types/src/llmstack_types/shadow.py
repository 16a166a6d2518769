"""Report of a shadow scheduler."""

from __future__ import annotations

from typing import NamedTuple


class ShadowFigures(NamedTuple):
    """Sums over the compared requests under one control plane; times since the arrival.

    Attributes:
        ttft_s: Seconds to the first token.
        queue_s: Seconds to the first step.
        e2e_s: Seconds to the end.
        num_preemptions: Preemptions.
    """

    ttft_s: float = 0.0
    queue_s: float = 0.0
    e2e_s: float = 0.0
    num_preemptions: int = 0


class ShadowReport(NamedTuple):
    """Three control planes on the same requests: the real one, the same one simulated, and the shadow, simulated.

    The second shows the error of the simulation; the third and the second differ by the settings alone.

    Attributes:
        name: The setting that the shadow changes.
        problem: Why it has ended, in one line; empty while it runs.
        num_requests: Requests that were compared since the start.
        num_shed: Steps and requests that were left out, since the shadow had no time for them.
        lag_s: How far it is behind.
        cpu_s: Processor time that it has taken.
        num_recent: Requests in the sums of the last ones.
        real, unchanged, shadow: Sums since the start.
        recent_real, recent_unchanged, recent_shadow: Sums of the last requests.
    """

    name: str
    problem: str = ""
    num_requests: int = 0
    num_shed: int = 0
    lag_s: float = 0.0
    cpu_s: float = 0.0
    num_recent: int = 0
    real: ShadowFigures = ShadowFigures()
    unchanged: ShadowFigures = ShadowFigures()
    shadow: ShadowFigures = ShadowFigures()
    recent_real: ShadowFigures = ShadowFigures()
    recent_unchanged: ShadowFigures = ShadowFigures()
    recent_shadow: ShadowFigures = ShadowFigures()
