"""`llmstack serve --headless`: engine cores without an HTTP server."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from llmstack_engine_client.factory import attach_async_client
from llmstack_engine_client.processes.engines import EngineProcesses
from llmstack_engine_core.ipc.addresses import free_addresses, prepare_address
from llmstack_engine_core.ipc.keys import keys_for, make_key_file
from llmstack_server.options.config import ServeConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.serving.engine_processes import run_until_signal, start_engine_processes
from llmstack_server.serving.event_loop import EarlySignals, in_daemon_thread
from llmstack_server.serving.launcher import StageTimer, one_line
from llmstack_types import LLMStackError

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
    return run_until_signal(lambda: _serve(config, timer), signals)


async def _serve(config: ServeConfig, timer: StageTimer) -> int:
    """Returns 1 soon after the last engine core has ended."""
    engines = await in_daemon_thread(lambda: start_engine_processes(config, timer), "start-engines")
    reporting = asyncio.create_task(_report_ready(config, timer, engines))
    ending = asyncio.create_task(engines.wait_for_end())
    try:
        await asyncio.wait((reporting, ending), return_when=asyncio.FIRST_COMPLETED)
        if reporting.done():
            reporting.result()
        await ending
        return 1
    finally:
        for task in (reporting, ending):
            task.cancel()
        await asyncio.gather(reporting, ending, return_exceptions=True)
        await engines.stop()


async def _report_ready(config: ServeConfig, timer: StageTimer, engines: EngineProcesses) -> None:
    addresses = " ".join(engines.addresses)
    logger.info("loading %s for servers that attach to %s", config.model or "the embedded demo model", addresses)
    client = attach_async_client(
        engines.addresses,
        client_index=_CLIENT_INDEX,
        start_timeout_s=START_TIMEOUT_S,
        key_file=config.engine.engine_key_file,
    )
    try:
        ready = await client.wait_until_ready()
    except LLMStackError as error:
        raise ServeError(one_line(error)) from error
    finally:
        await client.shutdown()
    logger.info(
        "engine cores are ready after %.1f s (%s on %s, up to %d tokens); serve them with: "
        "llmstack serve %s",
        timer.total_s, ready.dtype, ready.device, ready.max_model_len,
        " ".join(filter(None, (config.model, "--engine-address", addresses))),
    )  # fmt: skip
