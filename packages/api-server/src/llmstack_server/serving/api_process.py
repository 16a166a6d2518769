"""An API process: opens its engine, serves, and shuts the engine down."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmstack_engine_core.heap import share_heaps
from llmstack_server.options.config import ServeConfig
from llmstack_server.serving.engine_parts import (
    make_metrics,
    make_queue_monitor,
    note_ready,
    stat_loggers_of,
    watching_ticks,
)
from llmstack_server.serving.event_loop import EarlySignals, in_daemon_thread
from llmstack_server.serving.garbage import IdleCollections, freeze_start
from llmstack_server.serving.launcher import StageTimer
from llmstack_server.state.lifecycle import LifecycleState

if TYPE_CHECKING:
    from llmstack_llm import AsyncLLM, StatLogger
    from llmstack_server.observability.metrics import ServerMetrics
    from llmstack_server.state.peers import Peers
    from llmstack_server.state.queue_monitor import QueueMonitor
    from llmstack_server.state.server_state import ServerState

logger = logging.getLogger(__name__)

HEAD_START_S = 1.0
# Time to send the last spans; a collector that does not answer must not delay the exit.
TELEMETRY_TIMEOUT_S = 1.0

OpenEngine = Callable[[StageTimer, Sequence["StatLogger"]], "AsyncLLM"]
"""Opens an engine, given the timer of the start and the stat loggers; it may block."""


@dataclass(frozen=True, slots=True)
class ApiProcess:
    """One process that answers HTTP.

    Attributes:
        listener: A socket that listens already.
        open_engine: Starts the engine or attaches to one; called in a separate thread.
        on_ready: Awaited once the engine is ready, before requests are accepted; receives the seconds of each stage.
        peers: The other processes that answer on the same socket; None where this is the only one.
        accepts_early: Whether connections are accepted, and answered with 503, before the engine is ready.
    """

    config: ServeConfig
    timer: StageTimer
    listener: socket.socket
    signals: EarlySignals
    open_engine: OpenEngine
    on_ready: Callable[[ServerState, dict[str, float]], Awaitable[None]]
    peers: Peers | None = None
    accepts_early: bool = True

    async def run(self) -> int:
        """Serves until a signal (exit code 0) or the engine's death (1).

        Raises:
            ServeError: The engine could not start.
        """
        share_heaps()
        with self.timer.stage("import metrics"):
            metrics = make_metrics(self.config)
        queue = make_queue_monitor(self.config)
        stat_loggers = stat_loggers_of(self.config, metrics, queue)
        opening = in_daemon_thread(lambda: self.open_engine(self.timer, stat_loggers), "open-engine")
        try:
            # A local model is found in this time, and its process loads while the HTTP stack is imported here.
            await asyncio.wait((opening,), timeout=HEAD_START_S)
            if opening.done():
                opening.result()  # a missing model is reported before the HTTP stack is imported
            return await self._serve(opening, metrics, stat_loggers, queue)
        finally:
            await shut_down(opening)

    async def _serve(
        self,
        opening: asyncio.Future[AsyncLLM],
        metrics: ServerMetrics,
        stat_loggers: Sequence[StatLogger],
        queue: QueueMonitor,
    ) -> int:
        with self.timer.stage("import HTTP stack"):
            from llmstack_server.observability.telemetry.open import open_telemetry
            from llmstack_server.serving.server import Server
            from llmstack_server.state.server_state import ServerState
        with self.timer.stage("build application"):
            state = ServerState(self.config, None, metrics, peers=self.peers, queue=queue)
            state.telemetry = open_telemetry(self.config.observability, state.served_model_name)
            state.ticks += watching_ticks(state, stat_loggers)
            state.lifecycle.advance(LifecycleState.LOADING_MODEL)
            if self.peers is not None:
                self.peers.answer_with(state.peer_answers())
            server = Server(state, self.listener, opening, accepts_early=self.accepts_early, timer=self.timer)
        with self.timer.stage("collect garbage"):
            freeze_start()
        if self.signals.is_stop_requested:
            logger.info("stopped before the model was loaded")
            return 0
        try:
            return await server.run(lambda: self._note_ready(state, opening.result()))
        finally:
            if state.telemetry is not None:
                closing = in_daemon_thread(state.telemetry.close, "close-telemetry")
                await asyncio.wait((closing,), timeout=TELEMETRY_TIMEOUT_S)

    async def _note_ready(self, state: ServerState, engine: AsyncLLM) -> None:
        note_ready(state, engine)
        stages = {**self.timer.stage_to_s, "load tokenizer": engine.load_tokenizer_s}
        if state.ready is not None:
            stages |= {f"engine: {name}": seconds for name, seconds in state.ready.phases_s.items()}
        for stage, seconds in stages.items():
            state.metrics.startup_seconds.labels(stage).set(seconds)
        collections = IdleCollections(lambda: state.in_flight.count)
        collections.begin()
        state.ticks.append(collections.tick)
        await self.on_ready(state, stages)


async def shut_down(opening: asyncio.Future[AsyncLLM]) -> None:
    """Ends an engine that is open, or is being opened."""
    if not opening.cancel() and not opening.cancelled() and opening.exception() is None:
        await opening.result().shutdown()
