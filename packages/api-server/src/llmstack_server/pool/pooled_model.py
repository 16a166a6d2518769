"""One model among several: its state, its users and its memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llmstack_server.pool.waiting_room import WaitingRoom

if TYPE_CHECKING:
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp

    from llmstack_server.options.adapter_options import AdapterModule
    from llmstack_server.options.models_file import ModelEntry
    from llmstack_server.state.server_state import ServerState
    from llmstack_server.web.routes import RouteSpec

FIRST_RETRY_S = 5.0
MAX_RETRY_S = 300.0


class ModelStatus(StrEnum):
    """The state of a model, as `/v1/models` names it."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"
    UNLOADING = "unloading"
    FAILED = "failed"


class MemoryPlan(NamedTuple):
    """The bytes of a model's memory: processes, weights with what loading takes, keys and values."""

    process_bytes: int
    weight_bytes: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(self)

    def asleep_bytes(self, level: int) -> int:
        """The memory that stays in use at a sleep level, in bytes."""
        return self.process_bytes + (self.weight_bytes if level == 1 else 0)


class ModelHost(Protocol):
    """Starts and ends the engine of a model.

    Attributes:
        state: The state of the model's routes, which outlives its engine.
        adapters: Its adapters, in memory or not.
    """

    state: ServerState

    @property
    def adapters(self) -> Sequence[AdapterModule]:
        """The adapters by the names that requests use; before the model is loaded, those that it will have."""
        ...

    @property
    def app(self) -> ASGIApp:
        """The routes of the model."""

    @property
    def routes(self) -> Sequence[tuple[BaseRoute, RouteSpec]]:
        """The declarations of its routes."""

    def start(self) -> Awaitable[None]:
        """Starts the engine; returns when it can take requests, and raises LLMStackError where it cannot."""

    def stop(self) -> Awaitable[None]:
        """Ends the engine; nothing is left of it afterwards."""

    def check(self) -> Awaitable[None]:
        """Does what is done a few times per second; raises EngineDeadError once the engine is gone."""


class PooledModel:
    """One model of a pool.

    Attributes:
        loading: The load that runs; None where there is none.
        changing: Held while its engine starts or ends.
        charged_bytes: What it counts with against the memory of the pool.
        since_s: When it was loaded, or woke, by the clock.
        last_used_s: When it was used last.
        num_loads: Loads that have succeeded.
        num_failures: Loads that have failed, and engines that have died, since the last success.
        num_all_failures: The same since the start.
        num_evictions: How often it has made room for another model.
        load_s: Seconds that the last load has taken.
        waiting: The requests that wait until it is loaded.
    """

    def __init__(
        self, entry: ModelEntry, plan: MemoryPlan, host: ModelHost, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.entry, self.plan, self.host = entry, plan, host
        self.loading: asyncio.Task[None] | None = None
        self.changing = asyncio.Lock()
        self.phase = ModelStatus.UNLOADED
        self.charged_bytes = 0
        self.num_loads = self.num_failures = self.num_all_failures = self.num_evictions = 0
        self.load_s = 0.0
        self.since_s = self.last_used_s = clock()
        self._clock = clock
        self._num_users = 0
        self._failed_s = 0.0
        engine = host.state.config.engine
        self.waiting = WaitingRoom(engine.max_num_queued_reqs, engine.max_num_queued_tokens)

    @property
    def name(self) -> str:
        return self.entry.name

    def adapter(self, name: str) -> AdapterModule | None:
        """The adapter of a name."""
        return next((one for one in self.host.adapters if one.name == name), None)

    @property
    def status(self) -> ModelStatus:
        """Its state, as clients see it."""
        return ModelStatus.SLEEPING if self.is_asleep else self.phase

    @property
    def is_asleep(self) -> bool:
        """Whether it is loaded, and has to wake before it answers."""
        idle = self.host.state.idle
        return self.is_loaded and idle is not None and idle.is_asleep

    @property
    def is_loaded(self) -> bool:
        """Whether requests can reach the model, which wakes for them."""
        return self.phase is ModelStatus.LOADED

    @property
    def is_used(self) -> bool:
        """Whether a request is being answered, waits, or runs without its connection."""
        engine = self.host.state.opened_engine
        return self._num_users > 0 or (engine is not None and bool(engine.running_request_ids))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keeps it in memory until the block ends."""
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self.last_used_s = self._clock()

    def note_failure(self) -> None:
        """Its load has failed, or its engine has died: it may be loaded again after a while, the longer the oftener."""
        self.phase = ModelStatus.FAILED
        self.num_failures += 1
        self.num_all_failures += 1
        self._failed_s = self._clock()

    def seconds_until_retry(self) -> float:
        """Seconds until it may be loaded again; 0 where that is now."""
        if not self.num_failures:
            return 0.0
        pause_s = min(FIRST_RETRY_S * 2.0 ** min(self.num_failures - 1, 16), MAX_RETRY_S)
        return max(self._failed_s + pause_s - self._clock(), 0.0)
