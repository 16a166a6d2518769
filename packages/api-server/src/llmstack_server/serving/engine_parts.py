"""Metrics, queue monitor and facts around the engine of a model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llmstack_types import EngineDeadError

if TYPE_CHECKING:
    from llmstack_llm import AsyncLLM, StatLogger
    from llmstack_server.observability.metrics import ServerMetrics
    from llmstack_server.options.config import ServeConfig
    from llmstack_server.state.queue_monitor import QueueMonitor
    from llmstack_server.state.server_state import ServerState

logger = logging.getLogger(__name__)


def make_metrics(config: ServeConfig) -> ServerMetrics:
    """The metrics of a server, under the first name of its model."""
    from llmstack_server.observability.metrics import ServerMetrics

    engine = config.engine
    return ServerMetrics(
        config.served_model_names[0],
        has_aliases=config.http.has_metrics_aliases,
        has_engine_families=not engine.disable_log_stats,
        cache_facts={
            "enable_prefix_caching": str(engine.enable_prefix_caching),
            "gpu_memory_utilization": str(engine.gpu_memory_utilization),
            "num_cpu_blocks": str(engine.num_host_blocks),
        },
    )


def make_queue_monitor(config: ServeConfig) -> QueueMonitor:
    """The monitor of the queues of a model's engine cores."""
    from llmstack_server.state.queue_monitor import QueueMonitor

    engine = config.engine
    is_fair = engine.scheduling_policy in ("fair", "deadline")
    return QueueMonitor(
        engine.max_num_seqs,
        engine.fair_quantum if is_fair else 0,
        max_num_row_tokens=engine.long_prefill_token_threshold,
        max_prefill_tokens=engine.prefill_tokens(),
        max_itl_ms=engine.max_itl_ms or 0.0,
        max_itl_steps=engine.itl_steps(),
        shorter_prompts_first=engine.shorter_prompts_first,
        step_tokens=engine.step_tokens,
        has_deadlines=engine.scheduling_policy == "deadline",
    )


def stat_loggers_of(config: ServeConfig, metrics: ServerMetrics, queue: QueueMonitor) -> list[StatLogger]:
    """The receivers of the engine's reports about its steps."""
    from llmstack_llm.outputs.stats import LoggingStatLogger

    return [queue] if config.engine.disable_log_stats else [metrics, LoggingStatLogger(), queue]


def note_ready(state: ServerState, engine: AsyncLLM) -> None:
    """Gives the routes what is known of a model once its engine is ready."""
    from llmstack_server.chat.parsers import parsers_for

    state.chat_parsers = parsers_for(state.config.chat, engine.chat_template)
    state.sampling_defaults = lambda: engine.model_config.default_sampling
    state.facts = _facts(engine) | dict(state.chat_parsers.facts)
    logger.info("chat: %s", ", ".join(f"{name} {value}" for name, value in state.chat_parsers.facts))
    state.queue.first_tokens.progress = engine.output_processor.progress


def watching_ticks(state: ServerState, stat_loggers: Sequence[StatLogger]) -> list[Callable[[], None]]:
    """Work for a few times per second beside an engine: lines of statistics, restarts, stuck requests."""
    from llmstack_llm.outputs.stats import LoggingStatLogger
    from llmstack_server.observability.watchdog import StuckWatchdog

    gauge = state.metrics.stuck_requests
    state.watchdog = StuckWatchdog(state.config.observability.stuck_timeout_s, lambda count: gauge.set(count))

    def look() -> None:
        state.metrics.note_engine_restarts(state.engine.num_restarts)
        state.metrics.note_unmoved_requests(state.engine.num_unmoved_requests)
        try:
            state.watchdog.tick(state.engine)
        except EngineDeadError:  # the server ends by itself then
            return

    return [*(logger.tick for logger in stat_loggers if isinstance(logger, LoggingStatLogger)), look]


def _facts(engine: AsyncLLM) -> dict[str, object]:
    template = "plain fallback (texts joined by newlines)" if engine.chat_template.is_fallback else "jinja"
    is_uvloop = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    return {"chat_template": template, "uvloop": is_uvloop, "model_type": engine.model_config.model_type}
