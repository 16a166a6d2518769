"""A running server: uvicorn, the state of its engine, signals and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from llmstack_server.app import build_app
from llmstack_server.app.adapter_routes import load_configured_adapters
from llmstack_server.observability.logs import leave_out_paths, level_number
from llmstack_server.observability.request_log import RequestLog
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.serving.early_refusals import early_refusal
from llmstack_server.serving.event_loop import handled_signals
from llmstack_server.serving.launcher import StageTimer, one_line
from llmstack_server.serving.tls import make_tls_context, refresh_certificates, reload_certificates
from llmstack_server.serving.uvicorn_protocol import limited_protocol
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.websocket import can_open_websockets
from llmstack_types import EngineDeadError, LLMStackError

if TYPE_CHECKING:
    from llmstack_llm import AsyncLLM
    from llmstack_server.app.application import Application

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 0.25
# Time for the last answers, and for the errors of aborted requests, to reach their clients.
FLUSH_TIMEOUT_S = 2.0


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which would close the socket before the drain."""

    def __init__(self, config: uvicorn.Config, timer: StageTimer) -> None:
        super().__init__(config)
        self._timer = timer

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections, and measures how long that takes."""
        with self._timer.stage("start uvicorn"):
            await super().startup(sockets=sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no handlers; `Server` has its own."""
        yield


class Server:
    """Serves one application on one socket, once."""

    def __init__(
        self,
        state: ServerState,
        listener: socket.socket,
        opening: asyncio.Future[AsyncLLM] | None = None,
        *,
        accepts_early: bool = True,
        timer: StageTimer | None = None,
        app: Application | None = None,
    ) -> None:
        """`opening` results in the engine, where `state` has none yet.

        `timer`: Receives the seconds that uvicorn takes to start.
        `app`: What answers; None for the routes of one model.
        `accepts_early`: Whether connections are accepted, and answered with 503, before the engine is ready.
        """
        self._state = state
        self._opening = opening
        self._listener = listener
        self._config = _uvicorn_config(state, app or build_app(state))
        self._uvicorn = _Uvicorn(self._config, timer or StageTimer())
        self._stop = asyncio.Event()
        self._accepts = asyncio.Event()
        if accepts_early:
            self._accepts.set()
        self._forced_by: int | None = None

    async def run(self, on_ready: Callable[[], Awaitable[None]]) -> int:
        """Serves until a signal or the engine's death and returns the exit code; the caller shuts the engine down.

        `on_ready`: Awaited once the engine is ready, before requests are accepted.

        Raises:
            ServeError: The engine could not start.
        """
        serving = asyncio.create_task(self._accept())
        with handled_signals(self._on_signal, self._on_hangup), self._refreshed_certificates():
            try:
                return await self._run_until_end(serving, on_ready)
            finally:
                self._state.lifecycle.advance(LifecycleState.STOPPED)
                self._uvicorn.should_exit = True
                self._accepts.set()
                await asyncio.gather(serving, return_exceptions=True)
                await self._state.end()

    async def _accept(self) -> None:
        await self._accepts.wait()
        await self._uvicorn.serve(sockets=[self._listener])

    @contextlib.contextmanager
    def _refreshed_certificates(self) -> Iterator[None]:
        tls, context = self._state.config.http.tls, self._config.ssl
        if tls is None or context is None or not tls.is_refreshed:
            yield
            return
        refreshing = asyncio.create_task(refresh_certificates(context, tls))
        try:
            yield
        finally:
            refreshing.cancel()

    async def _run_until_end(self, serving: asyncio.Task[None], on_ready: Callable[[], Awaitable[None]]) -> int:
        if not await self._race(self._start(on_ready), serving):
            logger.info("stopped while loading")
            return 0
        if await self._race(self._watch_engine(), serving):
            await self._state.in_flight.wait_until_idle(FLUSH_TIMEOUT_S)
            return 1
        await self._drain()
        return 0 if self._forced_by is None else 128 + self._forced_by

    async def _race(self, work: Coroutine[Any, Any, None], serving: asyncio.Task[None]) -> bool:
        """True when `work` has ended by itself, False when a stop was requested first."""
        working = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((working, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                raise ServeError("the HTTP server ended unexpectedly")
            if working.done():
                working.result()
                return True
            return False
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _start(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        state = self._state
        await self._start_engine()
        await on_ready()
        state.lifecycle.advance(LifecycleState.READY)
        for begin in state.at_ready:
            begin()
        self._accepts.set()

    async def _start_engine(self) -> None:
        """Waits until the engine can take requests."""
        state = self._state
        if self._opening is not None:
            state.opened_engine = await asyncio.shield(self._opening)
            if state.config.http.request_log.logs_requests:
                state.engine.add_observer(RequestLog(state.config.http.request_log))
        state.lifecycle.advance(LifecycleState.INITIALIZING_ENGINE)
        try:
            state.ready = await state.engine.wait_until_ready()
            await state.adapters.begin(lambda: load_configured_adapters(state))
        except LLMStackError as error:
            raise ServeError(one_line(error)) from error
        if state.telemetry is not None:
            state.engine.add_observer(state.telemetry.engine_observer())

    async def _watch_engine(self) -> None:
        """Returns when the engine core has ended, and logs the reason."""
        while True:
            try:
                await self._state.engine.check_health()
            except EngineDeadError as error:
                logger.error("the engine core died (%s): requests in flight are lost, the server stops", error)
                return
            for tick in self._state.ticks:
                tick()
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _drain(self) -> None:
        state, timeout_s = self._state, self._state.config.http.shutdown_timeout_s
        state.lifecycle.advance(LifecycleState.DRAINING)
        state.in_flight.ask_to_end()
        if state.in_flight.count:
            logger.info("draining: %d requests in flight, up to %g s", state.in_flight.count, timeout_s)
        if not await state.in_flight.wait_until_idle(timeout_s):
            logger.warning("aborting %d requests that did not end in time", state.in_flight.count)
            state.in_flight.cut()
            await state.in_flight.wait_until_idle(FLUSH_TIMEOUT_S)

    def _on_hangup(self) -> None:
        """Reads the certificates again, where there are any; otherwise drains once."""
        tls, context = self._state.config.http.tls, self._config.ssl
        if tls is not None and context is not None:
            reload_certificates(context, tls)
        elif not self._stop.is_set():
            self._on_signal(signal.SIGHUP)

    def _on_signal(self, number: int) -> None:
        if not self._stop.is_set():
            logger.info("%s: shutting down", signal.Signals(number).name)
            self._stop.set()
            return
        logger.warning("%s again: aborting everything", signal.Signals(number).name)
        self._forced_by = number
        self._state.in_flight.cut()
        self._uvicorn.force_exit = True


def _websocket_protocol(http: HTTPConfig) -> Any:
    """The protocol behind the opening of a WebSocket; `none` where its library is not installed."""
    if not can_open_websockets():
        return "none"
    from llmstack_server.serving.websocket_protocol import limited_websocket  # late: few servers have the library

    return limited_websocket(http)


def _uvicorn_config(state: ServerState, app: Application) -> uvicorn.Config:
    http = state.config.http
    config = uvicorn.Config(
        app,
        http=limited_protocol(http, early_refusal(state, app.table)),
        ws=_websocket_protocol(http),
        ws_per_message_deflate=False,  # a few bytes could become many
        lifespan="off",
        loop="none",
        log_config=None,
        log_level=level_number(http.uvicorn_log_level),
        access_log=http.has_access_log,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=int(FLUSH_TIMEOUT_S),
    )
    config.load()
    leave_out_paths(http.unlogged_paths)
    config.ssl = None if http.tls is None else make_tls_context(http.tls)
    return config
