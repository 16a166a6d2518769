"""`llmstack serve` from its configuration to its exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from llmstack_server.config import ServeConfig
from llmstack_server.errors import ServeError
from llmstack_server.launcher import StageTimer, bind_socket, one_line, resolve_engine_args, start_engine, url_of
from llmstack_server.lifecycle import LifecycleState
from llmstack_server.logs import set_up_logging

if TYPE_CHECKING:
    from llmstack_llm import AsyncLLM
    from llmstack_server.http.metrics import ServerMetrics
    from llmstack_server.state import ServerState

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequestedError(BaseException):
    """A signal came while the model was being looked for; no `Exception`, so that nothing on the way swallows it."""


class EarlySignals:
    """Signals before there is an event loop: remembered, and raised only where nothing has to be undone."""

    def __init__(self) -> None:
        self.is_stop_requested = False
        self._can_raise = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Takes over the signals, and gives them back."""
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, a signal ends the block with `StopRequestedError`."""
        self._can_raise = True
        try:
            if self.is_stop_requested:
                raise StopRequestedError
            yield
        finally:
            self._can_raise = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_stop_requested = True
        if self._can_raise:
            raise StopRequestedError


def run_serve(config: ServeConfig) -> int:
    """Serves until a signal (exit code 0) or the engine's death (1).

    Raises:
        ServeError: The server could not start.
    """
    set_up_logging(config.http)
    for line in config.warnings:
        logger.warning("%s", line)
    signals = EarlySignals()
    with signals.installed():
        try:
            return _run_stages(config, signals)
        except StopRequestedError:
            logger.info("stopped before the model was loaded")
            return 0


def _run_stages(config: ServeConfig, signals: EarlySignals) -> int:
    timer = StageTimer()
    with timer.stage("bind socket"):
        listener = bind_socket(config.http.host, config.http.port)
    with listener:
        logger.info("listening on %s, loading %s", url_of(listener), config.model or "the embedded demo model")
        with timer.stage("resolve model"), signals.interruptible():
            arguments = resolve_engine_args(config)
        with timer.stage("import metrics"):
            metrics = _make_metrics(config)
        with timer.stage("start engine process"):
            engine = start_engine(arguments, _stat_loggers(config, metrics))
        return _run_event_loop(config, timer, listener, engine, metrics, signals)


def _make_metrics(config: ServeConfig) -> ServerMetrics:
    from llmstack_server.http.metrics import ServerMetrics

    return ServerMetrics(config.served_model_names[0], has_aliases=config.http.has_metrics_aliases)


def _stat_loggers(config: ServeConfig, metrics: ServerMetrics) -> list[object]:
    from llmstack_llm.stats import LoggingStatLogger

    # Without statistics the engine sends none; what the front end itself sees is counted all the same.
    return [metrics] if config.engine["disable_log_stats"] else [metrics, LoggingStatLogger()]


def _run_event_loop(
    config: ServeConfig,
    timer: StageTimer,
    listener: socket.socket,
    engine: AsyncLLM,
    metrics: ServerMetrics,
    signals: EarlySignals,
) -> int:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve_and_shut_down(config, timer, listener, engine, metrics, signals))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _serve_and_shut_down(
    config: ServeConfig,
    timer: StageTimer,
    listener: socket.socket,
    engine: AsyncLLM,
    metrics: ServerMetrics,
    signals: EarlySignals,
) -> int:
    try:
        # Imported while the engine process is already loading the model.
        with timer.stage("import HTTP stack"):
            from llmstack_server.server import Server
            from llmstack_server.state import ServerState
        with timer.stage("build application"):
            state = ServerState(config, engine, metrics)
            state.facts = _facts(engine)
            state.lifecycle.advance(LifecycleState.LOADING_MODEL)
            server = Server(state, listener)
        if signals.is_stop_requested:
            return 0
        return await server.run(lambda: _note_ready(state, timer, listener))
    finally:
        await engine.shutdown()


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
        url_of(listener), timer.total_s, state.served_model_name, device, table,
    )  # fmt: skip
    gc.collect()
    gc.freeze()  # what the start has made stays; no later collection walks it again


__all__ = ["EarlySignals", "ServeError", "StopRequestedError", "one_line", "run_serve"]
