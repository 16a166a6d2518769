"""Engine cores of a process that starts and watches them but sends no requests."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from llmstack_server.options.config import ServeConfig
from llmstack_server.serving.event_loop import EarlySignals, handled_signals, loop_factory, settle
from llmstack_server.serving.launcher import StageTimer, resolve_engine_args, start_error
from llmstack_types import LLMStackError

if TYPE_CHECKING:
    from llmstack_engine_client.hosts.relay import MembershipFeed
    from llmstack_engine_client.processes.spare import Spares
    from llmstack_engine_client.processes.supervisor import EngineProcess
    from llmstack_engine_client.recovery.restarts import RestartLimits
    from llmstack_engine_core import EngineConfig
    from llmstack_llm import EngineArgs

logger = logging.getLogger(__name__)

# An engine core that has ended may still have to log why.
LAST_WORDS_S = 0.5


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
        """Replaces a process that ends, and ends one that hangs.

        Where it may not be replaced, `on_death` is called on the running loop, with one line and whether it was killed.
        """
        for index in range(len(self.processes)):
            self._watch(index, on_death)

    def watch_until_end(self, outcome: asyncio.Future[int]) -> None:
        """As `watch`; `outcome`, the exit code, is 1 soon after a process has ended that may not be replaced."""
        loop = asyncio.get_running_loop()

        def on_death(line: str, was_killed: bool) -> None:
            logger.error("%s", line)
            loop.call_later(LAST_WORDS_S, settle, outcome, 1)

        self.watch(on_death)

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
        from llmstack_engine_client.recovery.restarts import MAX_SEARCH_RESTARTS, RestartLimits

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
        from llmstack_engine_client.processes.launcher import relaunch_engine_process

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


def run_until_signal(run: Callable[[], Coroutine[None, None, int | None]], signals: EarlySignals) -> int:
    """Runs a process without HTTP until a stop signal or SIGHUP, which cancels it, or its end.

    Returns its exit code, which is 0 after a signal and where it has none.
    """
    with signals.installed(), asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_until_signal(run, signals))


async def _until_signal(run: Callable[[], Coroutine[None, None, int | None]], signals: EarlySignals) -> int:
    stopped = asyncio.Event()

    def stop(number: int) -> None:
        logger.info("%s: stopping", signal.Signals(number).name)
        stopped.set()

    if signals.is_stop_requested:
        return 0
    running, stopping = asyncio.create_task(run()), asyncio.create_task(stopped.wait())
    with handled_signals(stop, partial(stop, signal.SIGHUP)):
        try:
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
            return 0 if stopped.is_set() else running.result() or 0
        finally:
            for task in (running, stopping):
                task.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)


def start_engine_processes(config: ServeConfig, timer: StageTimer) -> EngineProcesses:
    """Finds or downloads the model, and starts the engine cores without waiting for them.

    Raises:
        ServeError: The model cannot be found, an address cannot be used, or an argument contradicts the model.
    """
    addresses = list(config.processes.engine_addresses)
    with timer.stage("resolve model"):
        arguments = resolve_engine_args(config)
    if config.processes.is_attached:
        return EngineProcesses(arguments.model, addresses)
    with timer.stage("start engine processes"):
        try:
            if config.processes.is_headless or not arguments.has_other_hosts:
                return launch_engine_processes(arguments, addresses)
            members = _open_members(arguments)
            engines = launch_engine_processes(arguments, addresses)
            engines.members = members
            return engines
        except (LLMStackError, OSError) as error:
            raise start_error(error) from error


def _open_members(arguments: EngineArgs) -> MembershipFeed:
    """Listens for the other machines, before anything is started here.

    Raises:
        LLMStackError, OSError: The options or the model are unusable, or the address cannot be listened on.
    """
    from llmstack_engine_client.hosts.relay import MembershipFeed
    from llmstack_engine_client.hosts.rendezvous import Rendezvous
    from llmstack_llm.model.preflight import check_model_runs

    _, config = arguments.create_engine_config()
    check_model_runs(config)
    return MembershipFeed(Rendezvous(config).open(arguments.weights_name))


def launch_engine_processes(arguments: EngineArgs, addresses: Sequence[str]) -> EngineProcesses:
    """Starts the engine cores of these options without waiting for them.

    Raises:
        LLMStackError, OSError: The options or the model are unusable, or a process cannot be started.
    """
    from llmstack_engine_client.factory import engine_configs
    from llmstack_engine_client.processes.launcher import launch_engine_process, make_spares
    from llmstack_llm.model.preflight import check_model_runs

    _, engine_config = arguments.create_engine_config()
    check_model_runs(engine_config)
    hosts = engine_config.hosts
    configs = [] if hosts is not None and not hosts.num_local else engine_configs(engine_config)
    places = addresses or [""] * len(configs)
    engines = EngineProcesses(arguments.model, [])
    engines.configs = configs
    for config, address in zip(configs, places, strict=True):
        engines.processes.append(launch_engine_process(config, address or None))
    engines.spares = make_spares(engine_config)
    engines.addresses = [process.address for process in engines.processes]
    return engines
