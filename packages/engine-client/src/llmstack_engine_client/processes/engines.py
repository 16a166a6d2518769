"""Engine cores of a process that starts and watches them but sends no requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from llmstack_engine_client.processes.launcher import relaunch_engine_process
from llmstack_engine_client.processes.restarts import MAX_SEARCH_RESTARTS, RestartLimits
from llmstack_engine_client.processes.spare import Spares
from llmstack_engine_client.processes.supervisor import EngineProcess
from llmstack_engine_core.config import EngineConfig
from llmstack_types import LLMStackError

if TYPE_CHECKING:
    from llmstack_engine_client.hosts.relay import MembershipFeed

logger = logging.getLogger(__name__)

# An engine core that has ended may still have to log why.
LAST_WORDS_S: Final = 0.5


@dataclass(slots=True)
class EngineProcesses:
    """The engine cores of one server, or the addresses of engine cores run elsewhere.

    Attributes:
        model_path: The folder of the model.
        addresses: Addresses of the engine cores, in their order.
        processes: Processes started here; none where the engine cores run elsewhere.
        configs: The configuration of each.
        spares: Engine cores in reserve; None without.
        members: The other machines of the endpoint, where this process listens for them; None without.
        ended: Engine cores that have ended for good while others go on, and how.
        on_end: Called with each of them.
        on_loss: Called with each process that has ended, however that goes on.
    """

    model_path: str
    addresses: list[str]
    processes: list[EngineProcess] = field(default_factory=list)
    configs: list[EngineConfig] = field(default_factory=list)
    spares: Spares | None = None
    members: MembershipFeed | None = None
    ended: dict[int, str] = field(default_factory=dict)
    on_end: Callable[[int, str], None] | None = None
    on_loss: Callable[[EngineProcess], None] | None = None
    _is_stopping: bool = False
    _limits: dict[int, RestartLimits] = field(default_factory=dict)
    _replacements: set[asyncio.Task[None]] = field(default_factory=set)

    def watch(self, on_death: Callable[[str, bool], None]) -> None:
        """Replaces a process that has ended, and ends one that hangs.

        Where it may not be replaced, `on_death` is called on the running loop, with one line and whether it was killed.
        """
        for index in range(len(self.processes)):
            self._watch(index, on_death)

    async def wait_for_end(self) -> str:
        """Watches them; returns how they have ended, soon after the last one has for good."""
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_death(line: str, was_killed: bool) -> None:
            logger.error("%s", line)
            if not ended.done():
                ended.set_result(line)

        self.watch(on_death)
        line = await ended
        await asyncio.sleep(LAST_WORDS_S)
        return line

    def _watch(self, index: int, on_death: Callable[[str, bool], None]) -> None:
        loop, process = asyncio.get_running_loop(), self.processes[index]

        def ended() -> None:
            loop.remove_reader(process.death_fd)
            if self.on_loss is not None:
                self.on_loss(process)
            line = f"engine core {index} has ended: {process.describe_end()}"
            is_outside = process.was_killed or process.was_ended_from_outside
            if process.has_been_ready or (is_outside and index in self._limits):
                if not self._may_replace(index):
                    self._give_up(index, f"{line} too often", process.was_killed, on_death)
                    return
                logger.error("%s; another one starts", line)
                task = loop.create_task(self._replace(index, on_death))
                self._replacements.add(task)
                task.add_done_callback(self._replacements.discard)
            elif index in self._limits:  # it has logged why it cannot start, and so would the next one
                self._give_up(index, line, process.was_killed, on_death)
            else:
                on_death(line, process.was_killed)

        def look() -> None:
            process.look()
            if self.spares is not None and process.has_been_ready:
                self.spares.prepare()
            if process.is_alive:
                loop.call_later(process.look_interval_s, look)

        loop.add_reader(process.death_fd, ended)
        look()

    def _may_replace(self, index: int) -> bool:
        """Whether it is not too often within a minute; the clients' search for a request counts too."""
        max_restarts = self.configs[index].max_restarts
        limits = self._limits.setdefault(index, RestartLimits(max_restarts + MAX_SEARCH_RESTARTS))
        return max_restarts > 0 and limits.may_restart(is_search=False)

    def _give_up(self, index: int, line: str, was_killed: bool, on_death: Callable[[str, bool], None]) -> None:
        """An engine core is not replaced; the last one is the end of the server."""
        self.ended[index] = line
        if self.members is None and len(self.ended) == len(self.processes):
            on_death(line, was_killed)
            return
        logger.error("%s; the others go on", line)
        if self.on_end is not None:
            self.on_end(index, line)

    async def _replace(self, index: int, on_death: Callable[[str, bool], None]) -> None:
        try:
            process = await asyncio.to_thread(
                relaunch_engine_process, self.configs[index], self.processes[index], self.spares
            )
        except LLMStackError as error:
            self._give_up(index, f"engine core {index} cannot be replaced: {error}", False, on_death)
            return
        self.processes[index] = process
        if self._is_stopping:
            process.stop()
        else:
            self._watch(index, on_death)

    async def stop(self) -> None:
        """Stops all processes at the same time and removes their files; takes at most their grace period."""
        self._is_stopping = True
        if self._replacements:
            await asyncio.wait(self._replacements)
        if self.spares is not None:
            self.spares.close()
        for process in self.processes:
            asyncio.get_running_loop().remove_reader(process.death_fd)
            process.terminate()
        for process in self.processes:
            await asyncio.to_thread(process.stop)
        if self.members is not None:
            await self.members.close()
