"""`llmstack serve --headless`: engine cores without an HTTP server."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

from llmstack_engine_client.factory import attach_async_client
from llmstack_engine_core.ipc.addresses import free_addresses, prepare_address
from llmstack_engine_core.ipc.keys import keys_for, make_key_file
from llmstack_server.options.config import ServeConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.serving.engine_processes import EngineProcesses, start_engine_processes, stop_on_signal
from llmstack_server.serving.event_loop import EarlySignals, handled_signals, in_daemon_thread, loop_factory
from llmstack_server.serving.launcher import StageTimer, one_line
from llmstack_types import EngineReady, LLMStackError

logger = logging.getLogger(__name__)

# The index of a client that sends no requests: it waits until the engine cores are ready, and detaches.
_CLIENT_INDEX = 9999
START_TIMEOUT_S = 600.0


def with_addresses(config: ServeConfig) -> ServeConfig:
    """The configuration with free ports of the address by which the first machine sees this one.

    Raises:
        EngineStartError: The first machine cannot be reached.
    """
    addresses = free_addresses(str(config.engine.data_parallel_address), config.engine.num_local_engines)
    return replace(config, processes=replace(config.processes, engine_addresses=tuple(addresses)))


def run_headless(config: ServeConfig) -> int:
    """Runs engine cores until a signal (exit code 0) or the end of the last one (1).

    With other machines it also ends with the first one: with 0 where that was stopped.

    Raises:
        ServeError: They could not start, cannot listen on their addresses, or the first machine refuses them.
    """
    timer, signals, engine = StageTimer(), EarlySignals(), config.engine
    has_hosts = engine.has_other_hosts
    key_file = engine.cluster_key_file if has_hosts else engine.engine_key_file
    try:
        if has_hosts and not config.processes.engine_addresses:
            config = with_addresses(config)
        for address in config.processes.engine_addresses:
            prepare_address(address, is_remote=has_hosts)
            if key_file is not None and not has_hosts:
                make_key_file(Path(key_file))
            keys_for(address, key_file)
    except LLMStackError as error:
        raise ServeError(f"--engine-address: {one_line(error)}") from error
    if has_hosts:
        from llmstack_server.serving.hosts import run_joined

        return run_joined(config, timer, signals)
    with signals.installed(), asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(config, timer, signals))


async def _run(config: ServeConfig, timer: StageTimer, signals: EarlySignals) -> int:
    outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with handled_signals(partial(stop_on_signal, outcome), partial(stop_on_signal, outcome, signal.SIGHUP)):
        return await _run_until_end(config, timer, signals, outcome)


async def _run_until_end(
    config: ServeConfig, timer: StageTimer, signals: EarlySignals, outcome: asyncio.Future[int]
) -> int:
    opening = in_daemon_thread(lambda: start_engine_processes(config, timer), "start-engines")
    starting = asyncio.create_task(_start(config, timer, opening, outcome))
    try:
        if signals.is_stop_requested:
            return 0
        await asyncio.wait((starting, outcome), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        return await outcome
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if not opening.cancel() and opening.exception() is None:
            await opening.result().stop()


async def _start(
    config: ServeConfig, timer: StageTimer, opening: asyncio.Future[EngineProcesses], outcome: asyncio.Future[int]
) -> None:
    engines = await asyncio.shield(opening)
    addresses = " ".join(engines.addresses)
    logger.info("loading %s for servers that attach to %s", config.model or "the embedded demo model", addresses)

    engines.watch_until_end(outcome)
    ready = await _wait_until_ready(engines, config.engine.engine_key_file)
    logger.info(
        "engine cores are ready after %.1f s (%s on %s, up to %d tokens); serve them with: "
        "llmstack serve %s",
        timer.total_s, ready.dtype, ready.device, ready.max_model_len,
        " ".join(filter(None, (config.model, "--engine-address", addresses))),
    )  # fmt: skip


async def _wait_until_ready(engines: EngineProcesses, key_file: str | None) -> EngineReady:
    client = attach_async_client(
        engines.addresses, client_index=_CLIENT_INDEX, start_timeout_s=START_TIMEOUT_S, key_file=key_file
    )
    try:
        return await client.wait_until_ready()
    except LLMStackError as error:
        raise ServeError(one_line(error)) from error
    finally:
        await client.shutdown()
