"""One of several models of a process, with an engine that comes and goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmstack_server.app import build_model_app
from llmstack_server.app.adapter_routes import load_configured_adapters
from llmstack_server.observability.request_log import RequestLog
from llmstack_server.options.adapter_options import AdapterModule
from llmstack_server.options.config import ServeConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.serving.api_process import shut_down
from llmstack_server.serving.engine_parts import (
    make_metrics,
    make_queue_monitor,
    note_ready,
    stat_loggers_of,
    watching_ticks,
)
from llmstack_server.serving.event_loop import in_daemon_thread
from llmstack_server.serving.launcher import resolve_engine_args, start_engine
from llmstack_server.state.in_flight import InFlight
from llmstack_server.state.lifecycle import Lifecycle, LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_types import EngineStartError, InvalidRequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from llmstack_llm import AsyncLLM

logger = logging.getLogger(__name__)


class EngineHost:
    """A model with the state of a server that has it alone, except for what all models of the process share.

    Metrics, stored answers and routes stay when the engine ends; the next one goes on with them.

    Attributes:
        state: The state of its routes.
        app: The routes, without the layers that the process has before all models.
        routes: Their declarations.
    """

    def __init__(self, config: ServeConfig, in_flight: InFlight, kv_bytes: int) -> None:
        """`in_flight`: The requests of all models. `kv_bytes`: The size of the KV caches of all engine cores."""
        engine = replace(config.engine, kv_cache_memory_bytes=kv_bytes // config.engine.data_parallel_size)
        self._config = replace(config, engine=engine)
        self.state = ServerState(
            self._config, None, make_metrics(self._config), in_flight=in_flight, is_one_of_several=True
        )
        application = build_model_app(self.state)
        self.app: ASGIApp = application
        self.routes = application.table.routes
        self._ticks: list[Callable[[], None]] = []
        self._adapters = tuple(config.adapters.start_modules())
        self._has_started = False

    @property
    def adapters(self) -> Sequence[AdapterModule]:
        """The adapters by the names that requests use; before the model is loaded, those that it will have."""
        engine = self.state.opened_engine
        if engine is None or not self.state.lifecycle.is_ready:
            return self._adapters
        return [AdapterModule(one.name, one.path, one.base_model_name) for one in engine.adapters.adapters]

    async def start(self) -> None:
        """Starts the engine; returns when it can take requests.

        Raises:
            EngineStartError, EngineDeadError: It cannot be started; nothing is left of it.
        """
        state = self.state
        state.lifecycle, state.queue = Lifecycle(), make_queue_monitor(self._config)
        state.lifecycle.advance(LifecycleState.LOADING_MODEL)
        stat_loggers = stat_loggers_of(self._config, state.metrics, state.queue)

        def open_engine() -> AsyncLLM:
            return start_engine(resolve_engine_args(self._config), stat_loggers)

        opening = in_daemon_thread(open_engine, f"open-engine-{state.served_model_name}")
        try:
            state.opened_engine = await asyncio.shield(opening)
            state.lifecycle.advance(LifecycleState.INITIALIZING_ENGINE)
            if self._config.http.request_log.logs_requests:
                state.engine.add_observer(RequestLog(self._config.http.request_log))
            state.follow_start(await state.engine.wait_until_ready())
            await state.adapters.begin(self._load_adapters)
            note_ready(state, state.engine)
            self._ticks = watching_ticks(state, stat_loggers)
            for name, seconds in (state.ready.phases_s if state.ready is not None else {}).items():
                state.metrics.startup_seconds.labels(f"engine: {name}").set(seconds)
        except BaseException as error:
            self._forget_engine()
            await shut_down(opening)
            if isinstance(error, ServeError):
                raise EngineStartError(str(error)) from error
            raise
        state.lifecycle.advance(LifecycleState.READY)
        if state.idle is not None:
            state.idle.note_use()
        for begin in state.at_ready:
            begin()

    async def stop(self) -> None:
        """Ends the engine; state and routes stay."""
        engine, self._adapters = self.state.opened_engine, tuple(self.adapters)
        self._forget_engine()
        if engine is not None:
            await engine.shutdown()

    async def check(self) -> None:
        """Does what is done a few times per second; raises EngineDeadError once the engine is gone."""
        await self.state.engine.check_health()
        for tick in (*self.state.ticks, *self._ticks):
            tick()

    async def _load_adapters(self) -> None:
        """Loads the adapters of the configuration, and later those that the engine before had."""
        if not self._has_started:
            await load_configured_adapters(self.state)
            self._has_started = True
            return
        for one in self._adapters:
            try:
                await self.state.engine.load_adapter(one.name, one.path, one.base_model_name)
            except InvalidRequestError as error:  # its files may have been removed since
                logger.error("adapter %s of model %s is lost: %s", one.name, self.state.served_model_name, error)

    def _forget_engine(self) -> None:
        state = self.state
        state.lifecycle.advance(LifecycleState.STOPPED)
        state.opened_engine, self._ticks = None, []
        if state.idle is not None:
            state.idle.note_use()  # the next engine is awake
