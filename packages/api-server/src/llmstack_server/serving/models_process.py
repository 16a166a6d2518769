"""The process of a server with several models, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from llmstack_server.observability.metrics import ServerMetrics
from llmstack_server.options.config import ServeConfig, ServedModels
from llmstack_server.pool.dispatch import NamedModel
from llmstack_server.pool.model_pool import POLL_S, ModelPool
from llmstack_server.pool.pooled_model import MemoryPlan, PooledModel
from llmstack_server.pool.routes import build_models_app
from llmstack_server.serving.event_loop import EarlySignals
from llmstack_server.serving.garbage import IdleCollections, freeze_start
from llmstack_server.serving.launcher import StageTimer
from llmstack_server.serving.model_host import EngineHost
from llmstack_server.serving.ready_panel import ReadySummary, log_ready
from llmstack_server.serving.server import Server
from llmstack_server.serving.sockets import address_of
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.server_state import ServerState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelsProcess:
    """One process that answers HTTP for several models.

    Attributes:
        config: That of the server before all models.
        plans: What the memory of each model is for.
        listener: A socket that listens already.
    """

    config: ServeConfig
    models: ServedModels
    plans: Sequence[MemoryPlan]
    timer: StageTimer
    listener: socket.socket
    signals: EarlySignals

    async def run(self) -> int:
        """Serves until a signal; returns the exit code."""
        with self.timer.stage("build application"):
            metrics = ServerMetrics("", has_aliases=self.config.http.has_metrics_aliases)
            state = ServerState(self.config, None, metrics)
            hosts = [
                EngineHost(model.config, state.in_flight, plan.kv_bytes)
                for model, plan in zip(self.models.models, self.plans, strict=True)
            ]
            pool = ModelPool(
                self.models.file,
                [
                    PooledModel(model.entry, plan, host)
                    for model, plan, host in zip(self.models.models, self.plans, hosts, strict=True)
                ],
            )
            app = build_models_app(state, pool)
            for model in pool.models:
                model.host.state.application = NamedModel(app, model.name)
                model.host.state.is_name_taken = partial(_is_of_another, pool, model)
                model.host.state.adapters.share_changes(pool.models[0].host.state.adapters)
            state.lifecycle.advance(LifecycleState.LOADING_MODEL)
            server = _ModelsServer(state, self.listener, timer=self.timer, app=app)
            server.pool = pool
        with self.timer.stage("collect garbage"):
            freeze_start()
        if self.signals.is_stop_requested:
            return 0
        try:
            return await server.run(lambda: self._note_ready(state, pool))
        finally:
            for host in hosts:  # before the engines end: what they compute is left for the next server
                await host.state.end()
            await pool.shutdown()

    async def _note_ready(self, state: ServerState, pool: ModelPool) -> None:
        collections = IdleCollections(lambda: state.in_flight.count)
        collections.begin()
        state.ticks.append(collections.tick)
        names = ", ".join(model.name for model in pool.models)
        summary = ReadySummary(f"models {names}, loaded when requests name them")
        address = address_of(self.config.http, self.listener)
        log_ready(address, self.timer.total_s, summary, self.timer.stage_to_s, self.config.http)
        pool.load_left()


def _is_of_another(pool: ModelPool, model: PooledModel, name: str) -> bool:
    return pool.find(name) not in (None, model)


class _ModelsServer(Server):
    """A server that is ready without an engine, and ends by a signal alone.

    Attributes:
        pool: The models.
    """

    pool: ModelPool

    async def _start_engine(self) -> None:
        self._state.lifecycle.advance(LifecycleState.INITIALIZING_ENGINE)

    async def _watch_engine(self) -> None:
        while True:
            await self.pool.tick()
            for tick in self._state.ticks:
                tick()
            await asyncio.sleep(POLL_S)
