"""`llmstack serve --headless` on a machine that joins another one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING

from llmstack_engine_core.hosts.joining import Joining, JoinRefusedError
from llmstack_engine_core.hosts.messages import Join, own_version
from llmstack_server.options.config import ServeConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.serving.engine_processes import EngineProcesses, start_engine_processes, stop_on_signal
from llmstack_server.serving.event_loop import EarlySignals, handled_signals, in_daemon_thread, loop_factory
from llmstack_server.serving.launcher import StageTimer
from llmstack_types import EngineStartError

if TYPE_CHECKING:
    from llmstack_engine_core.config import EngineConfig

logger = logging.getLogger(__name__)


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
    opening = in_daemon_thread(lambda: start_engine_processes(config, timer), "start-engines")
    joining = asyncio.create_task(_join(opening, outcome))
    on_signal = partial(stop_on_signal, outcome)
    with handled_signals(on_signal, partial(on_signal, signal.SIGHUP)):
        try:
            await asyncio.wait((joining, outcome), return_when=asyncio.FIRST_COMPLETED)
            return outcome.result() if outcome.done() else joining.result()
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
            if not opening.cancel() and opening.exception() is None:
                await opening.result().stop()


async def _join(opening: asyncio.Future[EngineProcesses], outcome: asyncio.Future[int]) -> int:
    """Returns 0 when the first machine has been stopped.

    Raises:
        ServeError: The engine cores could not start, or the first machine refuses this one.
    """
    engines = await asyncio.shield(opening)
    engines.watch_until_end(outcome)
    config: EngineConfig = engines.configs[0]
    hosts = config.hosts
    if hosts is None:
        raise ServeError("there are no other machines")
    try:
        joining = Joining(hosts, config.key_file, config.start_timeout_s)
        join = Join(
            own_version(), hosts.size, hosts.start_rank, tuple(engines.addresses), joining.server_key, _own_name()
        )  # fmt: skip
        logger.info("engine cores listen on %s; joining %s", " ".join(engines.addresses), hosts.address)
        await joining.run(join)
    except (EngineStartError, JoinRefusedError) as error:
        raise ServeError(str(error)) from error
    logger.info("the first machine has ended")
    return 0


def _own_name() -> str:
    """This machine, for messages: its name, and the process."""
    return f"{socket.gethostname()[:128] or 'a machine'} (process {os.getpid()})"
