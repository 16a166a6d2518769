"""News of one engine core for `/live`, read and encoded once for all readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmstack_insight.timeline import timeline_of
from llmstack_server.app.steps import FoundSteps, read_steps
from llmstack_server.state.server_state import ServerState
from llmstack_server.web import sse

INTERVAL_S = 0.5
# Every reader gets a part this often: a proxy sees that the stream is alive, and a lost reader is found.
KEEP_ALIVE_S = 5.0
# What API processes ask each other for their part of the page, with the age of what is new in milliseconds.
TOPIC = "live"
# Predictions of so long ago are sent to a new reader, to one that was slow, and beside what is new.
KEPT_S, SLOW_S, OVERLAP_S = 3600.0, 120.0, 2.0
_OFFSET_S = time.time() - time.monotonic()

Reports = Sequence[Mapping[str, Any]]


class Position(NamedTuple):
    """The position of a reader.

    Attributes:
        core: The engine core that `step` is of; empty where that is not known.
        step: The last step that it has.
    """

    core: str
    step: int


@dataclass(slots=True)
class Part:
    """The steps after a position.

    Attributes:
        before, after: Positions of a reader before and after it.
        found: The steps.
        offset_s: What makes times of day of the times in them.
        reports: What API processes know of these requests.
        server: What every reader may see of the server.
        shadow: What a shadow scheduler has found, for operators.
        is_due: Whether readers get it even if it has no news for them.
    """

    before: Position
    after: Position
    found: FoundSteps
    offset_s: float
    reports: Reports
    server: Mapping[str, Any]
    shadow: Mapping[str, Any] | None
    is_due: bool
    _frames: dict[str | None, bytes] = field(default_factory=dict)

    def frame(self, tenant: str | None) -> bytes:
        """The event for a tenant, or for operators (None); empty where it has no news."""
        if tenant not in self._frames:
            body = self._of_all() if tenant is None else self._of(tenant)
            has_news = self.is_due or any(body[name] for name in ("steps", "events", "predictions"))
            self._frames[tenant] = sse.frame(sse.encode_json(body)) if has_news else b""
        return self._frames[tenant]

    def _of_all(self) -> dict[str, object]:
        rows = [row for report in self.reports for _, *row in report["predictions"]]
        timeline = timeline_of(self.found.log, self._time_of_day)
        body = {**self.server, "gap": self.found.gap, "predictions": rows, **timeline, "shadow": self.shadow}
        if body["weights"]:
            num_finishing = sum(report["num_finishing"] for report in self.reports)
            body["weights"] = {**body["weights"], "num_finishing": num_finishing}
        return body

    def _of(self, tenant: str) -> dict[str, object]:
        """The requests of one tenant, and nothing about those of others."""
        tenants = self.found.log.tenants
        own = [row for report in self.reports for owner, *row in report["predictions"] if owner == tenant]
        timeline = timeline_of(self.found.log, self._time_of_day, lambda name: tenants.get(name) == tenant)
        gap = self.found.gap
        if gap:
            gap = {**gap, "next": timeline["steps"][0][0] if timeline["steps"] else None}
        return {**self.server, "gap": gap, "predictions": own, **timeline}

    def _time_of_day(self, time_s: float) -> float:
        """Seconds since 1970 at a time by the clock of the engine core."""
        return time_s + self.offset_s


class LiveFeed:
    """Follows one engine core, while there are readers."""

    def __init__(self, state: ServerState, engine_index: int) -> None:
        self._state = state
        self._engine_index = engine_index
        self._clock = _Clock()
        self._position = Position("", 0)
        self._read_s = self._reported_s = self._due_s = 0.0
        self._reading: asyncio.Task[Part] | None = None

    async def first_part(self, position: Position) -> Part:
        """The first part for a new reader: the steps up to where the others are.

        Raises:
            EngineDeadError: The engine core is gone.
        """
        is_followed = self._reading is not None and not self._reading.done()
        part = await self._read(position, KEPT_S, until=self._position if is_followed else None)
        if not is_followed:
            self._position = part.after
        return part

    async def part_after(self, position: Position) -> Part:
        """The next part: the same for all readers at this position; raises EngineDeadError."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_next())
            self._reading.add_done_callback(_take_exception)
        part = await asyncio.shield(self._reading)  # a reader that goes away takes it from no other
        return part if part.before == position else await self._read(position, SLOW_S, until=part.after)

    async def _read_next(self) -> Part:
        await asyncio.sleep(max(0.0, self._read_s + INTERVAL_S - time.monotonic()))
        self._read_s = now_s = time.monotonic()
        is_due = now_s - self._due_s >= KEEP_ALIVE_S
        part = await self._read(self._position, min(KEPT_S, now_s - self._reported_s + OVERLAP_S), is_due=is_due)
        self._position = part.after
        if part.reports:
            self._reported_s = now_s
        if is_due:
            self._due_s = now_s
        return part

    async def _read(
        self, position: Position, age_s: float, until: Position | None = None, *, is_due: bool = True
    ) -> Part:
        asked_s = time.monotonic()
        found = await read_steps(self._state, self._engine_index, position.step, position.core)
        offset_s = self._clock.offset_s(found, asked_s, time.monotonic())
        if until is not None and until.core == found.core:
            known = [record for record in found.log.steps if record.stats.step <= until.step]
            found = found._replace(log=found.log._replace(steps=known))
        steps = found.log.steps
        after = steps[-1].stats.step if steps else 0 if found.gap else position.step
        is_due = is_due or bool(found.gap)
        state = self._state
        reports: Reports = ()
        if steps or is_due:
            reports = [report_of(state, age_s), *await state.ask_peers(f"{TOPIC} {round(1000 * age_s)}")]
        weights = {"name": state.weights_name, "num_finishing": None} if state.config.reload.changes_weights else None
        server = {
            "engine": self._engine_index, "num_engines": len(state.engine.engines), "core": found.core,
            "weights": weights,
        }  # fmt: skip
        shadow = state.metrics.shadows.live_part(self._engine_index)
        return Part(position, Position(found.core, after), found, offset_s, reports, server, shadow, is_due)


def _take_exception(read: asyncio.Task[Part]) -> None:
    """Its readers may all be gone, and asyncio logs exceptions that are never read."""
    if not read.cancelled():
        read.exception()


class _Clock:
    """The time of day at times of an engine core: always the same for one time, however late an answer comes."""

    def __init__(self) -> None:
        self._core: str | None = None
        self._offset_s = 0.0

    def offset_s(self, found: FoundSteps, asked_s: float, answered_s: float) -> float:
        """The answer was given between two times by the clock of this machine."""
        if found.core != self._core:
            is_ours = asked_s <= found.log.now_s <= answered_s  # else it is the clock of another machine
            self._core, self._offset_s = found.core, _OFFSET_S if is_ours else time.time() - found.log.now_s
        return self._offset_s


def report_of(state: ServerState, age_s: float) -> dict[str, object]:
    """The predictions of this process in the last seconds, and the number of requests with earlier weights."""
    return {"predictions": state.recent_requests.rows(age_s), "num_finishing": state.engine.num_finishing_requests}
