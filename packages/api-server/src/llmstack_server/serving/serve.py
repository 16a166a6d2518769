"""`llmstack serve` from its configuration to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmstack_server.observability.logs import set_up_logging
from llmstack_server.options.config import ServeConfig
from llmstack_server.serving.api_process import ApiProcess
from llmstack_server.serving.event_loop import EarlySignals, loop_factory
from llmstack_server.serving.garbage import start_without_collections
from llmstack_server.serving.launcher import StageTimer, resolve_engine_args, start_engine
from llmstack_server.serving.ready_panel import log_ready, ready_summary
from llmstack_server.serving.sockets import address_of, listening
from llmstack_server.serving.start_checks import check_named_files
from llmstack_server.serving.state_directory import deployment_secret

if TYPE_CHECKING:
    from llmstack_llm import AsyncLLM, StatLogger
    from llmstack_server.state.server_state import ServerState

logger = logging.getLogger(__name__)


def run_serve(config: ServeConfig) -> int:
    """Serves until a signal (exit code 0) or the engine's death (1).

    Raises:
        ServeError: The server could not start.
    """
    set_up_logging(config.http)
    for line in config.warnings:
        logger.warning("%s", line)
    if config.model_choice and not config.processes.is_attached:
        logger.info("%s", config.model_choice)
    if config.processes.is_attached:
        logger.info("attaching to engine cores at %s", " ".join(config.processes.engine_addresses))
    if config.engine.node_rank:
        from llmstack_server.serving.hosts import run_node

        return run_node(config)
    if config.processes.is_headless:
        from llmstack_server.serving.headless import run_headless

        return run_headless(config)
    if config.models is None:
        check_named_files(config)
    with deployment_secret(config.http.state_dir) as secret:
        config = replace(config, deployment_secret=secret)
        if config.models is not None:
            from llmstack_server.serving.models_server import run_models

            return run_models(config, config.models)
        if config.processes.num_api_servers > 1:
            from llmstack_server.serving.api_servers import run_multi_api_server

            return run_multi_api_server(config)
        return run_server(config)


def run_server(config: ServeConfig) -> int:
    """Serves from this process alone; returns the exit code."""
    timer, signals = StageTimer(), EarlySignals(stops_on_hangup=config.http.tls is None)
    with signals.installed(), start_without_collections(), contextlib.ExitStack() as stack:
        with timer.stage("bind socket"):
            listener = stack.enter_context(listening(config.http))
        address = address_of(config.http, listener)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            logger.info("listening on %s, loading %s", address, config.model or "the embedded demo model")
            return runner.run(_single_process(config, timer, listener, signals).run())


def _single_process(
    config: ServeConfig, timer: StageTimer, listener: socket.socket, signals: EarlySignals
) -> ApiProcess:
    def open_engine(timer: StageTimer, stat_loggers: Sequence[StatLogger]) -> AsyncLLM:
        with timer.stage("resolve model"):
            arguments = resolve_engine_args(config)
        with timer.stage("start engine process"):
            return start_engine(
                arguments,
                stat_loggers,
                multiprocess=config.processes.is_multiprocess,
                addresses=config.processes.engine_addresses,
            )

    async def on_ready(state: ServerState, stages: dict[str, float]) -> None:
        log_ready(address_of(config.http, listener), timer.total_s, ready_summary(state), stages, config.http)

    return ApiProcess(config, timer, listener, signals, open_engine, on_ready)


__all__ = ["EarlySignals", "run_serve"]
