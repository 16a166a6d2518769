"""`llmstack serve --headless` on a machine that joins another one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from llmstack_engine_core.hosts.joining import Joining, JoinRefusedError
from llmstack_engine_core.hosts.messages import Join, Load, LoadFailed, own_version
from llmstack_engine_core.ipc.addresses import free_addresses
from llmstack_model_files import ModelFilesError
from llmstack_server.options.config import ServeConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.options.reload_options import START_NAME, engine_args_of
from llmstack_server.serving.engine_processes import (
    LAST_WORDS_S,
    EngineProcesses,
    launch_engine_processes,
    start_engine_processes,
    stop_on_signal,
)
from llmstack_server.serving.event_loop import EarlySignals, handled_signals, in_daemon_thread, loop_factory, settle
from llmstack_server.serving.launcher import StageTimer, one_line
from llmstack_types import EngineStartError, LLMStackError

if TYPE_CHECKING:
    from llmstack_engine_core.config import EngineConfig

logger = logging.getLogger(__name__)

# Those that finish requests, those that take them, and those that start.
MAX_GENERATIONS: Final = 3


def run_joined(config: ServeConfig, timer: StageTimer, signals: EarlySignals) -> int:
    """Runs engine cores for the first machine, until a signal, its end, or the end of the last engine core (1).

    Raises:
        ServeError: They could not start, or the first machine refuses them.
    """
    with signals.installed(), asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(config, timer, signals))


async def _run(config: ServeConfig, timer: StageTimer, signals: EarlySignals) -> int:
    outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    if signals.is_stop_requested:
        return 0
    machine = _Machine(config)
    running = asyncio.create_task(machine.run(lambda: start_engine_processes(config, timer)))
    on_signal = partial(stop_on_signal, outcome)
    with handled_signals(on_signal, partial(on_signal, signal.SIGHUP)):
        try:
            await asyncio.wait((running, outcome), return_when=asyncio.FIRST_COMPLETED)
            return outcome.result() if outcome.done() else running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class _EnginesEndedError(Exception):
    """Engine cores have ended for good, and the log has said why."""


class _Machine:
    """The engine cores of this machine: those of now, and during a reload also those before or after.

    Each generation joins the first machine by a connection of its own, and ends when that says so.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._start_model_path = ""
        self._generations: dict[str, asyncio.Task[None]] = {}

    async def run(self, open_first: Callable[[], EngineProcesses]) -> int:
        """The exit code, when no engine cores are left.

        Raises:
            ServeError: They could not start, or the first machine refuses them.
        """
        self._generations[""] = asyncio.create_task(self._serve(Load("", START_NAME), open_first, None))
        exit_code = 0
        try:
            while self._generations:
                await asyncio.wait(self._generations.values(), return_when=asyncio.FIRST_COMPLETED)
                for generation, task in list(self._generations.items()):
                    if task.done():
                        del self._generations[generation]
                        exit_code = self._note_end(task.exception())
        finally:
            for task in self._generations.values():
                task.cancel()
            await asyncio.gather(*self._generations.values(), return_exceptions=True)
        if not exit_code:
            logger.info("the first machine has ended")
        return exit_code

    def _note_end(self, error: BaseException | None) -> int:
        """The exit code if these were the last engine cores; raises their error then."""
        if error is None:
            return 0
        if not isinstance(error, _EnginesEndedError) and not self._generations:
            raise error
        if not isinstance(error, _EnginesEndedError):
            logger.error("%s", error)
        return 1

    async def _serve(self, load: Load, launch: Callable[[], EngineProcesses], asked: Joining | None) -> None:
        """Starts engine cores, and returns when the first machine has ended them.

        `asked`: The connection that the order came by; None for those of the start.

        Raises:
            ServeError: They could not start, or are refused.
            _EnginesEndedError: They have ended for good.
        """
        opening = in_daemon_thread(launch, "start-engines")
        try:
            engines = await asyncio.shield(opening)
            if not load.generation:
                self._start_model_path = engines.model_path
            await self._stay(load, engines)
        except (LLMStackError, ModelFilesError, OSError) as error:
            if asked is not None:
                asked.tell(LoadFailed(load.generation, one_line(error)))
            raise ServeError(f"no engine cores of {load.name}: {one_line(error)}") from error
        finally:
            if not opening.cancel() and opening.exception() is None:
                await opening.result().stop()

    async def _stay(self, load: Load, engines: EngineProcesses) -> None:
        """Stays joined until the first machine ends these engine cores."""
        config: EngineConfig = engines.configs[0]
        if config.hosts is None:
            raise ServeError("there are no other machines")
        loop = asyncio.get_running_loop()
        end: asyncio.Future[int] = loop.create_future()

        def on_death(line: str, was_killed: bool) -> None:
            logger.error("%s", line)
            joining.tell(LoadFailed(load.generation, line))
            loop.call_later(LAST_WORDS_S, settle, end, 1)

        try:
            joining = Joining(
                config.hosts, config.key_file, config.start_timeout_s, lambda other: self._start_others(joining, other)
            )
            engines.watch(on_death)
            join = Join(
                own_version(), config.hosts.size, config.hosts.start_rank, tuple(engines.addresses),
                joining.server_key, _own_name(), load.generation,
            )  # fmt: skip
            logger.info("engine cores listen on %s; joining %s", " ".join(engines.addresses), config.hosts.address)
            staying = asyncio.create_task(joining.run(join))
            try:
                await asyncio.wait((staying, end), return_when=asyncio.FIRST_COMPLETED)
                if not staying.done():
                    raise _EnginesEndedError
                staying.result()
            finally:
                staying.cancel()
                await asyncio.gather(staying, return_exceptions=True)
        except (EngineStartError, JoinRefusedError) as error:
            raise ServeError(str(error)) from error

    def _start_others(self, asked: Joining, load: Load) -> None:
        """Follows an order of the first machine; it may come more than once."""
        if load.generation in self._generations:
            return
        if len(self._generations) >= MAX_GENERATIONS:
            asked.tell(LoadFailed(load.generation, "engine cores of earlier reloads have not ended yet"))
            return
        logger.info("starting engine cores of %s", load.name)
        serving = self._serve(load, partial(self._launch, load.name), asked)
        self._generations[load.generation] = asyncio.create_task(serving)

    def _launch(self, name: str) -> EngineProcesses:
        """Starts engine cores of an entry of this machine's list.

        Raises:
            LLMStackError, ModelFilesError, OSError: There is no such entry, no room, or a process cannot be started.
        """
        from llmstack_llm.model.preflight import find_memory_problem

        entries = self._config.reload.entries
        if name not in entries:
            raise EngineStartError(f"--reload-models has no entry {name}")
        arguments = engine_args_of(entries[name], self._config.engine, self._start_model_path)
        _, config = arguments.create_engine_config()
        if problem := find_memory_problem(config):
            raise EngineStartError(problem)
        addresses = free_addresses(str(arguments.data_parallel_address), arguments.num_local_engines)
        return launch_engine_processes(arguments, addresses)


def _own_name() -> str:
    """This machine, for messages: its name, and the process."""
    return f"{socket.gethostname()[:128] or 'a machine'} (process {os.getpid()})"
