"""What a server does a few times per second beside answering."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_llm.stats import LoggingStatLogger
from llmstack_server.state import ServerState
from llmstack_server.watchdog import StuckWatchdog
from llmstack_types import EngineDeadError


def watch(state: ServerState, stat_loggers: Sequence[object]) -> None:
    """From now on the log's lines come in time, and requests that get nowhere are noticed."""
    gauge = state.metrics.stuck_requests
    state.watchdog = StuckWatchdog(state.config.observability.stuck_timeout_s, lambda count: gauge.set(count))

    def look() -> None:
        state.metrics.note_engine_restarts(state.engine.num_restarts)
        try:
            state.watchdog.tick(state.engine)
        except EngineDeadError:  # somebody else's business
            return

    state.ticks += [logger.tick for logger in stat_loggers if isinstance(logger, LoggingStatLogger)]
    state.ticks.append(look)
