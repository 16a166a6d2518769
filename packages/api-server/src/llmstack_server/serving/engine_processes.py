"""Start and end of a process with engine cores that sends no requests."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING

from llmstack_server.options.config import ServeConfig
from llmstack_server.serving.event_loop import EarlySignals, handled_signals, loop_factory
from llmstack_server.serving.launcher import StageTimer, resolve_engine_args, start_error
from llmstack_types import LLMStackError

if TYPE_CHECKING:
    from llmstack_engine_client.hosts.relay import MembershipFeed
    from llmstack_engine_client.processes.engines import EngineProcesses
    from llmstack_llm import EngineArgs

logger = logging.getLogger(__name__)


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
        from llmstack_engine_client.processes.engines import EngineProcesses

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
    from llmstack_engine_client.processes.engines import EngineProcesses
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
