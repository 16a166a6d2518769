"""`llmstack serve` from its configuration to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from llmstack_server.config import ServeConfig
from llmstack_server.errors import ServeError
from llmstack_server.launcher import StageTimer, resolve_engine_args, start_engine
from llmstack_server.lifecycle import LifecycleState
from llmstack_server.listening import address_of, listening
from llmstack_server.logs import set_up_logging

if TYPE_CHECKING:
    from llmstack_llm import AsyncLLM
    from llmstack_server.http.metrics import ServerMetrics
    from llmstack_server.state import ServerState

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
HEAD_START_S = 1.0


class EarlySignals:
    """Signals before the server listens to them: remembered."""

    def __init__(self) -> None:
        self.is_stop_requested = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Takes over the signals, and gives them back."""
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_stop_requested = True


def run_serve(config: ServeConfig) -> int:
    """Serves until a signal (exit code 0) or the engine's death (1).

    Raises:
        ServeError: The server could not start.
    """
    set_up_logging(config.http)
    for line in config.warnings:
        logger.warning("%s", line)
    timer, signals = StageTimer(), EarlySignals()
    with signals.installed(), contextlib.ExitStack() as stack:
        with timer.stage("bind socket"):
            listener = stack.enter_context(listening(config.http))
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            address = address_of(config.http, listener)
            logger.info("listening on %s, loading %s", address, config.model or "the embedded demo model")
            return runner.run(_serve_and_shut_down(config, timer, listener, signals))


def _make_metrics(config: ServeConfig) -> ServerMetrics:
    from llmstack_server.http.metrics import ServerMetrics

    return ServerMetrics(config.served_model_names[0], has_aliases=config.http.has_metrics_aliases)


def _stat_loggers(config: ServeConfig, metrics: ServerMetrics) -> list[object]:
    from llmstack_llm.stats import LoggingStatLogger

    # Without statistics the engine sends none; what the front end itself sees is counted all the same.
    return [metrics] if config.engine["disable_log_stats"] else [metrics, LoggingStatLogger()]


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _serve_and_shut_down(
    config: ServeConfig, timer: StageTimer, listener: socket.socket, signals: EarlySignals
) -> int:
    with timer.stage("import metrics"):
        metrics = _make_metrics(config)
    opening = _open_engine_in_thread(config, timer, _stat_loggers(config, metrics))
    try:
        # A model that is at hand is opened by then: its process loads while the HTTP stack is imported here.
        await asyncio.wait((opening,), timeout=HEAD_START_S)
        with timer.stage("import HTTP stack"):
            from llmstack_server.server import Server
            from llmstack_server.state import ServerState
        with timer.stage("build application"):
            state = ServerState(config, None, metrics)
            state.lifecycle.advance(LifecycleState.LOADING_MODEL)
            server = Server(state, listener, opening)
        if signals.is_stop_requested:
            logger.info("stopped before the model was loaded")
            return 0

        def on_ready() -> None:
            state.facts = _facts(opening.result())
            _note_ready(state, timer, listener)

        return await server.run(on_ready)
    finally:
        await _shut_down(opening)


def _open_engine_in_thread(
    config: ServeConfig, timer: StageTimer, stat_loggers: list[object]
) -> asyncio.Future[AsyncLLM]:
    """Finds the model, which may mean to download it, and starts the engine process.

    In a daemon thread: a signal must end the server at once, and nothing can interrupt a download.
    """
    loop = asyncio.get_running_loop()
    opening: asyncio.Future[AsyncLLM] = loop.create_future()

    def settle(engine: AsyncLLM | None, error: Exception | None) -> None:
        if opening.done():
            return  # stopped meanwhile; the engine process ends with this one
        if engine is not None:
            opening.set_result(engine)
        else:
            opening.set_exception(error or ServeError("the engine could not be started"))

    def open_engine() -> None:
        engine, error = None, None
        try:
            with timer.stage("resolve model"):
                arguments = resolve_engine_args(config)
            with timer.stage("start engine process"):
                engine = start_engine(arguments, stat_loggers)
        except Exception as caught:  # noqa: BLE001 - whatever it is, the event loop has to hear of it
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, engine, error)

    threading.Thread(target=open_engine, name="open-engine", daemon=True).start()
    return opening


async def _shut_down(opening: asyncio.Future[AsyncLLM]) -> None:
    if not opening.cancel() and not opening.cancelled() and opening.exception() is None:
        await opening.result().shutdown()


def _facts(engine: AsyncLLM) -> dict[str, object]:
    template = "plain fallback (texts joined by newlines)" if engine.chat_template.is_fallback else "jinja"
    is_uvloop = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    return {"chat_template": template, "uvloop": is_uvloop}


def _note_ready(state: ServerState, timer: StageTimer, listener: socket.socket) -> None:
    """The one line at Ready, with the table of the start below it."""
    ready = state.ready
    stages = dict(timer.stage_to_s)
    if ready is not None:
        stages |= {f"engine: {name}": seconds for name, seconds in ready.phases_s.items()}
    for stage, seconds in stages.items():
        state.metrics.startup_seconds.labels(stage).set(seconds)
    table = "\n".join(f"  {stage:<32} {seconds:7.3f} s" for stage, seconds in stages.items())
    device = "" if ready is None else f", {ready.dtype} on {ready.device}, up to {ready.max_model_len} tokens"
    logger.info(
        "llmstack is ready on %s after %.1f s (model %s%s)\n%s",
        address_of(state.config.http, listener), timer.total_s, state.served_model_name, device, table,
    )  # fmt: skip
    gc.collect()
    gc.freeze()  # what the start has made stays; no later collection walks it again


__all__ = ["EarlySignals", "run_serve"]
