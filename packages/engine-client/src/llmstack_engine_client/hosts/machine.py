"""A machine that joins the first one with its engine cores."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from llmstack_engine_client.hosts.joining import Joining
from llmstack_engine_client.hosts.messages import Failed, Join, Start, own_name
from llmstack_engine_client.hosts.rendezvous import facts_of, first_machine
from llmstack_engine_core.config import EngineConfig
from llmstack_types import EngineStartError

logger = logging.getLogger(__name__)

# Those that finish requests, those that take them, and those that start.
MAX_GENERATIONS: Final = 3


class Engines(Protocol):
    """Engine cores in processes of this machine.

    Attributes:
        addresses: Where they listen.
        configs: The configuration of each.
    """

    addresses: list[str]
    configs: list[EngineConfig]

    async def wait_for_end(self) -> str:
        """Watches them; returns how they have ended for good, which the log has."""
        ...

    async def stop(self) -> None:
        """Ends their processes, at once or after a grace period."""
        ...


class EnginesEndedError(Exception):
    """Engine cores have ended for good, and the log has said why."""


class Machine:
    """The engine cores of this machine: those of now, and during a reload also those before or after.

    Each generation joins the first machine by a connection of its own, and ends when that says so.
    """

    def __init__(self, launch: Callable[[Start], Awaitable[Engines]], name: str = "") -> None:
        """Starts nothing yet.

        Args:
            launch: Starts the engine cores of a generation; that of the start has no name. Raises EngineStartError.
            name: The machine, for messages; its own name by default.
        """
        self._launch, self._name = launch, name or own_name()
        self._generations: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Returns when the first machine has ended the last engine cores.

        Raises:
            EngineStartError: They could not start, or the first machine refuses them.
            EnginesEndedError: They have ended for good.
        """
        self._generations[""] = asyncio.create_task(self._serve(Start(""), None))
        error: BaseException | None = None
        try:
            while self._generations:
                await asyncio.wait(self._generations.values(), return_when=asyncio.FIRST_COMPLETED)
                for generation in [generation for generation, task in self._generations.items() if task.done()]:
                    error = self._generations.pop(generation).exception()
                    if self._generations and error is not None and not isinstance(error, EnginesEndedError):
                        logger.error("%s", error)
        finally:
            for task in self._generations.values():
                task.cancel()
            await asyncio.gather(*self._generations.values(), return_exceptions=True)
        if error is not None:
            raise error
        logger.info("the first machine has ended")

    async def _serve(self, start: Start, asked: Joining | None) -> None:
        """Starts engine cores, and returns when the first machine has ended them.

        `asked`: The connection that the order came by; None for those of the start.
        """
        try:
            engines = await self._launch(start)
        except EngineStartError as error:
            if asked is None:
                raise
            asked.tell(Failed(start.generation, str(error)))
            raise EngineStartError(f"no engine cores of {start.name}: {error}") from error
        try:
            await self._stay(start, engines)
        finally:
            await engines.stop()

    async def _stay(self, start: Start, engines: Engines) -> None:
        """Stays joined until the first machine ends these engine cores."""
        config = engines.configs[0]
        if config.hosts is None:
            raise EngineStartError("there are no other machines")

        def on_start(other: Start) -> None:
            self._follow(other, joining)

        joining = Joining(first_machine(config.hosts, config.key_file), config.start_timeout_s, on_start=on_start)
        join = Join(
            self._name, config.hosts.start_rank, facts_of(config.hosts), tuple(engines.addresses),
            joining.server_key, start.generation,
        )  # fmt: skip
        logger.info("engine cores listen on %s; joining %s", " ".join(engines.addresses), config.hosts.address)
        staying, ending = asyncio.create_task(joining.run(join)), asyncio.create_task(engines.wait_for_end())
        try:
            await asyncio.wait((staying, ending), return_when=asyncio.FIRST_COMPLETED)
            if not staying.done():
                joining.tell(Failed(start.generation, ending.result()))
                raise EnginesEndedError
            staying.result()
        finally:
            for task in (staying, ending):
                task.cancel()
            await asyncio.gather(staying, ending, return_exceptions=True)

    def _follow(self, start: Start, asked: Joining) -> None:
        """Follows an order of the first machine; it may come more than once."""
        if start.generation in self._generations:
            return
        if len(self._generations) >= MAX_GENERATIONS:
            asked.tell(Failed(start.generation, "engine cores of earlier reloads have not ended yet"))
            return
        logger.info("starting engine cores of %s", start.name)
        self._generations[start.generation] = asyncio.create_task(self._serve(start, asked))
