"""Search of better settings, one at a time, each value with all requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from llmstack_engine_client.prediction.cost_model import CostModel
from llmstack_insight.rerun import ControlPlane, PlaneError, RecordedRequest, changed_plane, rerun
from llmstack_insight.tune.figures import Figures, figures_of
from llmstack_insight.tune.target import Target

Settings = Mapping[str, str]

# The values of a number that are tried are these times the present one.
FACTORS: Final = (0.25, 0.5, 2.0, 4.0)
MIN_NUM_SEQS: Final = 1
MIN_BATCHED_TOKENS: Final = 16
PREFILL_TOKENS: Final = (0, 256, 1024)
MAX_BATCHED_TOKENS: Final = 65_536
MAX_NUM_SEQS: Final = 4096
# A change has to be worth naming.
MIN_GAIN: Final = 0.01


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Bounds of a search.

    Attributes:
        max_runs: Settings that are tried.
        max_seconds: No further ones are begun after so long.
    """

    max_runs: int = 40
    max_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Space:
    """The settings that may be changed.

    Attributes:
        policies: That are tried.
        max_num_blocks: More blocks than recorded are tried up to so many; None tries none.
    """

    policies: tuple[str, ...] = ("fcfs",)
    max_num_blocks: int | None = None

    @classmethod
    def of(cls, requests: Sequence[RecordedRequest], recorded: str, max_num_blocks: int | None = None) -> Space:
        """The policies between which the requests make a difference, and the recorded one."""
        policies = {recorded: None, "fcfs": None}
        if any(one.request.priority for one in requests):
            policies["priority"] = None
        if len({one.request.tenant for one in requests}) > 1:
            policies["fair"] = None
        if any(one.request.deadline_s is not None for one in requests):
            policies["deadline"] = None
        return cls(tuple(policies), max_num_blocks)

    def values(self, name: str, plane: ControlPlane) -> list[str]:
        """The other values of a setting that are worth a try."""
        scheduler = plane.scheduler
        if name == "policy":
            return [policy for policy in self.policies if policy != scheduler.policy]
        if name == "num_blocks":
            most = self.max_num_blocks or plane.cache.num_blocks
            return _scaled(plane.cache.num_blocks, 1, most, (2.0, 4.0))
        if name == "max_num_seqs":
            return _scaled(scheduler.max_num_seqs, MIN_NUM_SEQS, MAX_NUM_SEQS)
        least = MIN_BATCHED_TOKENS if scheduler.enable_chunked_prefill else scheduler.max_model_len
        if name == "max_num_batched_tokens":
            return _scaled(scheduler.max_num_batched_tokens, least, MAX_BATCHED_TOKENS)
        if name == "max_prefill_tokens":
            return [str(value) for value in PREFILL_TOKENS if value != scheduler.max_prefill_tokens]
        budget = scheduler.max_num_batched_tokens
        if not scheduler.enable_chunked_prefill:
            return []
        return [str(value) for value in dict.fromkeys((0, budget // 2, budget // 4)) if value != _threshold(plane)]


SETTINGS: Final = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "policy",
    "long_prefill_token_threshold",
    "max_prefill_tokens",
    "num_blocks",
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings, and what the requests would get under them."""

    settings: Settings
    figures: Figures

    def rank(self, target: Target) -> tuple[float, float]:
        """Smaller is better: how far it misses the target, then how long requests take."""
        mean_s = self.figures.value("e2e_mean")
        return target.excess(self.figures), inf if mean_s is None else mean_s


@dataclass(slots=True)
class _Search:
    requests: Sequence[RecordedRequest]
    plane: ControlPlane
    cost_model: CostModel
    target: Target
    limits: SearchLimits
    clock: Callable[[], float]
    tried: dict[frozenset[tuple[str, str]], Candidate | None] = field(default_factory=dict)
    end_s: float = 0.0
    max_refused: float = inf

    def __post_init__(self) -> None:
        self.end_s = self.clock() + self.limits.max_seconds

    @property
    def is_over(self) -> bool:
        """Whether no further settings may be tried."""
        return len(self.tried) >= self.limits.max_runs or self.clock() >= self.end_s

    def try_settings(self, settings: Settings) -> Candidate | None:
        """The outcome of the requests under these settings; None if they contradict each other."""
        key = frozenset(settings.items())
        if key not in self.tried:
            self.tried[key] = self._run(settings)
        return self.tried[key]

    def plane_of(self, settings: Settings) -> ControlPlane:
        """The control plane with these settings in place of the recorded ones."""
        if not settings:
            return self.plane
        return changed_plane(self.plane, ",".join(f"{name}={value}" for name, value in settings.items()))

    def _run(self, settings: Settings) -> Candidate | None:
        try:
            scheduler = self.plane_of(settings).build()
        except ValueError:
            return None
        outcomes = rerun(self.requests, scheduler, self.cost_model)
        ends = [one.arrival_s + outcome.e2e_s for one, outcome in zip(self.requests, outcomes, strict=True) if outcome]
        span_s = max(ends) - self.requests[0].arrival_s if ends else None
        figures = figures_of(outcomes, span_s)
        # The figures of fewer requests are no better ones.
        return Candidate(dict(settings), figures) if figures.plain["refused"] <= self.max_refused else None


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        unchanged: The recorded settings, with the same cost model.
        best: The best ones that were tried.
        num_tried: How many were.
        is_complete: Whether the search ended by itself, not by its bound.
    """

    unchanged: Candidate
    best: Candidate
    num_tried: int
    is_complete: bool


def search(
    requests: Sequence[RecordedRequest],
    plane: ControlPlane,
    cost_model: CostModel,
    target: Target,
    space: Space,
    limits: SearchLimits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Changes one setting after the other to its best value, until no change is worth it.

    Raises:
        SimulationError: The scheduler makes no progress.
        PlaneError: The recorded settings cannot be built.
    """
    work = _Search(requests, plane, cost_model, target, limits or SearchLimits(), clock)
    unchanged = best = work.try_settings({})
    if unchanged is None or best is None:
        raise PlaneError("the recorded settings cannot be built by these packages")
    work.max_refused = unchanged.figures.plain["refused"]
    is_improved = True
    while is_improved and not work.is_over:
        before = best
        for name in SETTINGS:
            best = _best_value(work, space, best, name)
        is_improved = before is not best
    return Found(unchanged, best, len(work.tried), not work.is_over)


def _best_value(work: _Search, space: Space, best: Candidate, name: str) -> Candidate:
    for value in space.values(name, work.plane_of(best.settings)):
        if work.is_over:
            break
        settings = {**best.settings, name: value}
        if value == _recorded_value(work.plane, name):
            del settings[name]
        candidate = work.try_settings(settings)
        if candidate is not None and _is_better(candidate, best, work.target):
            best = candidate
    return best


def _is_better(one: Candidate, other: Candidate, target: Target) -> bool:
    excess, mean_s = one.rank(target)
    other_excess, other_mean_s = other.rank(target)
    if excess != other_excess:
        return excess < other_excess * (1.0 - MIN_GAIN)
    return mean_s < other_mean_s * (1.0 - MIN_GAIN)


def _recorded_value(plane: ControlPlane, name: str) -> str:
    source = plane.cache if name == "num_blocks" else plane.scheduler
    return str(getattr(source, name))


def _threshold(plane: ControlPlane) -> int:
    return plane.scheduler.long_prefill_token_threshold


def _scaled(value: int, least: int, most: int, factors: Sequence[float] = FACTORS) -> list[str]:
    scaled = (min(max(round(value * factor), least), most) for factor in factors)
    return [str(one) for one in dict.fromkeys(scaled) if one != value]
