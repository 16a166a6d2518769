"""Loads and evictions of the models of one server, under one bound of memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llmstack_server.pool.pooled_model import ModelStatus, PooledModel
from llmstack_server.pool.waiting_room import WaitingRoom
from llmstack_server.web.errors import HTTPError, model_unavailable, rate_limit_exceeded
from llmstack_server.web.rate_limit import MinuteBucket
from llmstack_types import EngineDeadError, LLMStackError

if TYPE_CHECKING:
    from llmstack_server.options.models_file import ModelsFile

logger = logging.getLogger(__name__)

MIN_STAY_S = 60.0
"""Seconds that a model stays at least, so that two models that need each other's memory do not only load."""
POLL_S = 0.25
MAX_READING_BYTES = 256 << 20
"""Bodies that are read, or held, at one time, of all keys; each has its share of them."""
_NO_ROOM = "The models in memory are in use, and there is no room for this one."


class ModelPool:
    """Loads models when they are asked for, and evicts those that were unused for longest.

    A model that is used is never evicted, and neither is one that was loaded, or woke, less than `MIN_STAY_S` ago.
    One engine starts at a time. Lives on one event loop.

    Attributes:
        models: In the order of their file.
        memory_bytes: What the engine cores may use together.
        reading: The bodies that are read for the name of a model, in bytes.
        held: The bodies that were read for it, and wait until it is loaded.
        read_ahead: What is read of bodies while their models are loaded, in bytes.
    """

    def __init__(
        self, file: ModelsFile, models: Sequence[PooledModel], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.models = tuple(models)
        self.memory_bytes = file.memory_bytes
        self.reading = WaitingRoom(None, MAX_READING_BYTES)
        self.held = WaitingRoom(None, MAX_READING_BYTES)
        self.read_ahead = WaitingRoom(None, MAX_READING_BYTES)
        self._file, self._clock = file, clock
        self._name_to_model = {name: model for model in models for name in (model.name, *model.entry.aliases)}
        self._tenant_to_budget: dict[str, MinuteBucket] = {}
        self._turn = asyncio.Lock()
        self._tasks, self._ending = set[asyncio.Task[None]](), set[asyncio.Task[None]]()
        self._is_stopping = False
        for model in models:
            self._follow_sleep(model)

    def find(self, name: str) -> PooledModel | None:
        """The model with this name or alias, or with an adapter of this name."""
        model = self._name_to_model.get(name)
        return model or next((one for one in self.models if one.adapter(name) is not None), None)

    @property
    def charged_bytes(self) -> int:
        """The memory with which the loaded models count, in bytes."""
        return sum(model.charged_bytes for model in self.models)

    async def wait_until_loaded(self, model: PooledModel, tenant: str | None) -> None:
        """Returns when the model is loaded. The load is the tenant's, unless one runs already; None for the server.

        Raises:
            HTTPError: 429, the tenant has caused too many loads; 503, the model cannot be loaded now.
        """
        while not model.is_loaded:
            if model.loading is None:
                self._check_load(model, tenant)
                model.loading = asyncio.create_task(self._load(model))
                self._keep(model.loading)
            await asyncio.shield(model.loading)

    async def wait_until_awake(self, model: PooledModel, tenant: str) -> None:
        """Returns when the model is loaded and does not sleep. A wake that evicts others is charged as a load.

        Raises:
            HTTPError: 429, the tenant has caused too many loads; 503, the model cannot be loaded, or wake, now.
            EngineDeadError: It cannot be woken.
        """
        await self.wait_until_loaded(model, tenant)
        idle = model.host.state.idle
        if idle is None or not idle.is_asleep:
            return
        if not idle.is_waking and self._missing_bytes(model, model.entry.memory_bytes) > 0:
            self._charge(tenant)
        await idle.wake()

    def load_left(self) -> None:
        """Loads the models that have answers of an earlier server to finish, one after the other."""
        left = [model for model in self.models if model.host.state.num_left_answers]
        if left:
            self._keep(asyncio.create_task(self._load_each(left)))

    async def _load_each(self, models: Sequence[PooledModel]) -> None:
        for model in models:
            with model.used():
                try:
                    await self.wait_until_loaded(model, None)
                except HTTPError as error:
                    reason = error.answer.message
                    logger.warning("model %s: answers wait until a request loads it: %s", model.name, reason)

    async def tick(self) -> None:
        """Looks after the models that are loaded; to be called a few times per second."""
        for model in self.models:
            if not model.is_loaded:
                continue
            if model.is_used:
                model.last_used_s = self._clock()
            try:
                await model.host.check()
            except EngineDeadError as error:
                logger.error("model %s: its engine core died (%s), its requests are lost", model.name, error)
                await self._unload(model, has_failed=True)
            else:
                await self._charge_awake(model)

    async def shutdown(self) -> None:
        """Ends loads, then all engines."""
        self._is_stopping = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._ending, return_exceptions=True)
        await asyncio.gather(*(self._unload(model) for model in self.models if model.host.state.opened_engine))

    def _check_load(self, model: PooledModel, tenant: str | None) -> None:
        """Charges the tenant with a load; raises HTTPError where that is not allowed now."""
        if self._is_stopping:
            raise HTTPError(model_unavailable("The server is shutting down.", 1.0))
        if (pause_s := model.seconds_until_retry()) > 0:
            raise HTTPError(model_unavailable(f"The model {model.name} could not be loaded.", pause_s))
        if tenant is not None:
            self._charge(tenant)

    def _charge(self, tenant: str) -> None:
        """Takes one load of a tenant's share of a minute; raises HTTPError 429 where it has none left."""
        budget = self._tenant_to_budget.get(tenant)
        if budget is None:  # there are as many tenants as keys
            budget = self._tenant_to_budget[tenant] = MinuteBucket(self._file.loads_per_minute, self._clock)
        if (wait_s := budget.take()) > 0:
            limit = self._file.loads_per_minute
            raise HTTPError(rate_limit_exceeded(f"At most {limit} models a minute are loaded for one API key.", wait_s))

    async def _charge_awake(self, model: PooledModel) -> None:
        """Counts a model whose sleeping engine core has died, and was restarted awake, or ends it for lack of room."""
        idle = model.host.state.idle
        if idle is None or idle.is_asleep or model.charged_bytes == model.entry.memory_bytes:
            return
        if self._missing_bytes(model, model.entry.memory_bytes) > 0 and not model.is_used:
            logger.warning("model %s was restarted, and others have its memory: it ends", model.name)
            await self._unload(model)
        else:
            model.charged_bytes = model.entry.memory_bytes

    async def _load(self, model: PooledModel) -> None:
        try:
            async with model.changing:  # its engine before may be ending still
                model.phase = ModelStatus.LOADING
                await self._reserve(model, model.entry.memory_bytes)
                async with self._turn:
                    logger.info("loading model %s", model.name)
                    began_s = self._clock()
                    await model.host.start()
        except (HTTPError, asyncio.CancelledError):  # there is no room for it, or the server stops
            model.phase = ModelStatus.UNLOADED
            raise
        except Exception as error:  # whatever it is, the other models serve on
            is_known = isinstance(error, LLMStackError)
            logger.error("model %s cannot be loaded: %s", model.name, error, exc_info=not is_known)
            model.note_failure()
            pause_s = model.seconds_until_retry()
            raise HTTPError(model_unavailable(f"The model {model.name} could not be loaded.", pause_s)) from None
        else:
            model.phase = ModelStatus.LOADED
            model.since_s = model.last_used_s = self._clock()
            model.num_loads, model.num_failures, model.load_s = model.num_loads + 1, 0, self._clock() - began_s
            logger.info("model %s is ready after %.1f s", model.name, model.load_s)
        finally:
            model.loading = None
            if not model.is_loaded:
                model.charged_bytes = 0

    async def _reserve(self, model: PooledModel, num_bytes: int) -> None:
        """Raises what a model counts with to so many bytes; evicts others first where that is needed.

        Raises:
            HTTPError: 503, there was no room for it in time, or no request waits for it any more.
        """
        until_s = self._clock() + self._file.load_timeout_s
        while (missing := self._missing_bytes(model, num_bytes)) > 0:
            victims = self._victims(model, missing)
            if victims:
                for victim in victims:  # at once, so that no request comes to one that ends
                    victim.phase = ModelStatus.UNLOADING
                await asyncio.gather(*(self._evict(victim, model) for victim in victims))
                continue
            if self._clock() >= until_s or not model.is_used:
                raise HTTPError(model_unavailable(_NO_ROOM, MIN_STAY_S / 2))
            await asyncio.sleep(POLL_S)
        model.charged_bytes = num_bytes

    def _missing_bytes(self, model: PooledModel, num_bytes: int) -> int:
        """The bytes that are missing for a model of this size; 0 or less where there is room."""
        return self.charged_bytes - model.charged_bytes + num_bytes - self.memory_bytes

    def _victims(self, wanted: PooledModel, num_bytes: int) -> list[PooledModel]:
        latest_s = self._clock() - MIN_STAY_S
        candidates = [
            one for one in self.models
            if one is not wanted and one.is_loaded and one.since_s <= latest_s and not one.is_used
        ]  # fmt: skip
        return _longest_unused(candidates, num_bytes)

    async def _evict(self, model: PooledModel, wanted: PooledModel) -> None:
        unused_s = self._clock() - model.last_used_s
        logger.info("model %s, unused for %.0f s, makes room for %s", model.name, unused_s, wanted.name)
        model.num_evictions += 1
        await self._unload(model)

    async def _unload(self, model: PooledModel, *, has_failed: bool = False) -> None:
        """Ends an engine, of which nothing is left afterwards; the end of its caller, as by a signal, ends no part."""
        model.phase = ModelStatus.UNLOADING
        ending = asyncio.create_task(self._end(model, has_failed=has_failed))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)

    async def _end(self, model: PooledModel, *, has_failed: bool) -> None:
        async with model.changing:
            try:
                await model.host.stop()
            finally:
                model.phase = ModelStatus.UNLOADED
                model.charged_bytes = 0
                if has_failed:
                    model.note_failure()

    def _follow_sleep(self, model: PooledModel) -> None:
        """Counts a model with less while it sleeps, and makes room for it before it wakes."""
        idle = model.host.state.idle
        if idle is None:
            return

        async def before_wake() -> None:
            await self._reserve(model, model.entry.memory_bytes)
            model.since_s = self._clock()

        def after_sleep() -> None:
            if model.is_loaded:
                model.charged_bytes = model.plan.asleep_bytes(idle.level)

        idle.before_wake, idle.after_sleep = before_wake, after_sleep

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # those that waited have it


def _longest_unused(candidates: Sequence[PooledModel], num_bytes: int) -> list[PooledModel]:
    """The models unused for longest that free so many bytes together, and no more of them; empty where none do."""
    chosen: list[PooledModel] = []
    freed = 0
    for one in sorted(candidates, key=lambda one: one.last_used_s):
        if freed < num_bytes:
            chosen.append(one)
            freed += one.charged_bytes
    if freed < num_bytes:
        return []
    for one in list(chosen):  # a later one may have made an earlier one superfluous
        if freed - one.charged_bytes >= num_bytes:
            chosen.remove(one)
            freed -= one.charged_bytes
    return chosen
