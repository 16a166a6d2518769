"""The sleep of an engine that nothing uses, and its end at the next request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from llmstack_types import LLMStackError

logger = logging.getLogger(__name__)


class SleepingEngine(Protocol):
    """The methods of an engine front end that its sleep needs."""

    @property
    def sleep_level(self) -> int: ...
    @property
    def running_request_ids(self) -> list[str]: ...
    async def sleep(self, level: int = 1) -> bool: ...
    async def wake_up(self) -> None: ...


class IdleSleep:
    """Puts an engine to sleep when nothing has used it for a while, and wakes it for the next request.

    The sleep that an operator asks for is another one: it is neither begun nor ended here.

    Attributes:
        is_asleep: Whether the engine sleeps because of this, or is about to; requests wait for `wake`.
        before_wake: Awaited before the engine wakes; what it raises leaves the engine asleep.
        after_sleep: Called when the engine has fallen asleep.
        last_used_s: When it was used last, by the clock.
        num_sleeps: How often the engine has fallen asleep by itself.
        num_wakes: How often it has been woken.
        wake_s: Seconds that this has taken in all.
    """

    def __init__(
        self,
        engine: Callable[[], SleepingEngine | None],
        after_s: float | None,
        level: int = 1,
        clock: Callable[[], float] = time.monotonic,
        name: str = "",
    ) -> None:
        """`engine`: Gives the engine; None before there is one. `after_s`: Seconds without use; None for never.

        `name`: The name of its model, for the log.
        """
        self.is_asleep = False
        self.before_wake: Callable[[], Awaitable[None]] | None = None
        self.after_sleep: Callable[[], None] | None = None
        self.num_sleeps = self.num_wakes = 0
        self.wake_s = 0.0
        self._engine, self.after_s, self.level, self._clock = engine, after_s, level, clock
        self._name = name
        self.last_used_s = clock()
        self._num_users = 0
        self._tenants = set[str]()  # that have used it since it woke
        self._kept_s: float | None = None  # what the last request asked for
        self._sleeping: asyncio.Task[None] | None = None
        self._waking: asyncio.Task[None] | None = None

    @property
    def is_used(self) -> bool:
        """Whether a request is being answered, or runs without its connection."""
        engine = self._engine()
        return self._num_users > 0 or (engine is not None and bool(engine.running_request_ids))

    @property
    def is_waking(self) -> bool:
        """Whether a wake runs that others may join."""
        return self._waking is not None

    def seconds_left(self) -> float | None:
        """Seconds until the engine falls asleep if nothing uses it; None for never."""
        after_s = self.after_s if self._kept_s is None else self._kept_s
        if after_s is None:
            return None
        return 0.0 if self.is_asleep else max(self.last_used_s + after_s - self._clock(), 0.0)

    def keep(self, seconds: float, tenant: str, *, is_operator: bool) -> bool:
        """Lets the engine sleep so long after the current request, if no later one comes; False if it does not.

        Less than the usual time is for operators, and for a tenant that alone has used the engine since it woke.
        """
        if self.after_s is None or (seconds < self.after_s and not is_operator and not self._tenants <= {tenant}):
            return False
        self._kept_s = seconds
        return True

    @contextmanager
    def used(self, tenant: str = "") -> Iterator[None]:
        """Keeps the engine from falling asleep until the block ends."""
        self._num_users += 1
        self._tenants.add(tenant)
        self._kept_s = None
        try:
            yield
        finally:
            self._num_users -= 1
            self.last_used_s = self._clock()

    def tick(self) -> None:
        """Begins the sleep if it is due; to be called a few times per second, on the event loop."""
        engine = self._engine()
        if engine is None or self._sleeping is not None or self._waking is not None:
            return
        if self.is_asleep and not engine.sleep_level:  # another engine core has taken the place of one that died
            self.note_use()
        if self.is_used:
            self.last_used_s = self._clock()
        elif self.seconds_left() == 0.0 and not self.is_asleep and not engine.sleep_level:
            self.is_asleep = True  # from here on requests wait, so that none comes to an engine that sleeps
            self._sleeping = asyncio.create_task(self._sleep(engine))

    def note_use(self) -> None:
        """An operator has woken the engine, or put it to sleep: what was slept by itself is over."""
        self.is_asleep = False
        self.last_used_s = self._clock()

    async def wake(self) -> None:
        """Returns once the engine is awake; one caller's cancellation is not that of the others.

        Raises:
            EngineDeadError: It cannot be woken.
        """
        while self.is_asleep:
            if self._waking is None:
                self._waking = asyncio.create_task(self._wake())
                self._waking.add_done_callback(_note_error)
            await asyncio.shield(self._waking)

    async def _sleep(self, engine: SleepingEngine) -> None:
        try:
            if not await engine.sleep(self.level):  # a request runs after all
                self.note_use()
                return
            self.num_sleeps += 1
            self._tenants.clear()
            self._kept_s = None
            logger.info("model %s sleeps: nothing has used it for %.0f s", self._name, self._clock() - self.last_used_s)
            if self.after_sleep is not None:
                self.after_sleep()
        except LLMStackError as error:
            logger.warning("model %s is idle and does not sleep: %s", self._name, error)
            self.note_use()
        finally:
            self._sleeping = None

    async def _wake(self) -> None:
        try:
            if self._sleeping is not None:
                await asyncio.gather(self._sleeping, return_exceptions=True)
            engine = self._engine()
            if self.is_asleep and engine is not None:
                began_s = self._clock()
                if self.before_wake is not None:
                    await self.before_wake()
                await engine.wake_up()
                self.num_wakes += 1
                self.wake_s += self._clock() - began_s
                logger.info("model %s is awake after %.2f s", self._name, self._clock() - began_s)
            self.note_use()
        finally:
            self._waking = None


def _note_error(task: asyncio.Task[None]) -> None:
    """The error of a wake is for the requests that wait, as far as there are any left."""
    if not task.cancelled():
        task.exception()
