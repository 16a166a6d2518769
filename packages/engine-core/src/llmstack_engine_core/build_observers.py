"""Construction of the observers of an engine core from its configuration."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from importlib import import_module
from typing import cast

from llmstack_core_scheduler.media_numbers import MediaNumbers
from llmstack_engine_core.block_residency import BlockResidency
from llmstack_engine_core.cache_news import CacheNews
from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.events import EventBus, StepLogger
from llmstack_engine_core.profiles import StepProfiles
from llmstack_engine_core.protocols import EventHook, ModelRunner, ProfilingRunner, ShadowSource
from llmstack_kv_cache import KVCacheManager
from llmstack_step_log import DeferredLog, FileSink, LogHeader, RingSink, Sink, StepLog
from llmstack_step_log.control_plane import CacheConfig
from llmstack_types import EngineStartError

logger = logging.getLogger(__name__)

# Found by name: it is in a package above this one.
SHADOW = "llmstack_insight.shadow.feed"


def make_block_residency(config: EngineConfig, cache: CacheConfig) -> BlockResidency | None:
    """The hook that measures how long blocks stay in the cache, if the option is on."""
    sample = config.block_metrics_sample
    if not sample:
        return None
    return BlockResidency(cache.block_size, sample, time.monotonic, len(cache.sliding_windows))


def make_profiles(config: EngineConfig, runner: ModelRunner) -> StepProfiles | None:
    """The profiler, if the option is given.

    Raises:
        EngineStartError: The model runner does not record any, or the folder cannot be created.
    """
    if config.profiler is None:
        return None
    if not hasattr(runner, "start_profile"):
        raise EngineStartError(
            "--profiler-config: this model runner records no profiles; one of several ranks does not"
        )
    return StepProfiles(config.profiler, cast(ProfilingRunner, runner))


def make_cache_news(config: EngineConfig, kv_cache: KVCacheManager, numbers: MediaNumbers | None) -> CacheNews:
    """The follower of the prefix cache, which publishes its events if the option is given.

    Raises:
        EngineStartError: An endpoint cannot be listened on, or others could read it.
    """
    if config.kv_events is None or not config.kv_events.is_on:
        return CacheNews(kv_cache, numbers=numbers)
    from llmstack_engine_core.zmq_publisher import ZmqPublisher

    return CacheNews(kv_cache, ZmqPublisher(config.kv_events, config.key_file, numbers), numbers)


def make_event_bus(config: EngineConfig, own: Sequence[EventHook], event_hooks: Sequence[EventHook]) -> EventBus:
    """The event bus of the engine core's own hooks, the log, the trace and the user's hooks, in this order."""
    hooks = list(own)
    if logger.isEnabledFor(logging.DEBUG):
        hooks.append(StepLogger())
    if config.trace:
        from llmstack_engine_core.trace import TraceHook

        hooks.append(TraceHook())
    return EventBus([*hooks, *event_hooks], time.monotonic)


def make_shadow(config: EngineConfig, header: LogHeader) -> ShadowSource | None:
    """Another control plane on the same inputs, where that is asked for.

    Raises:
        EngineStartError: There is none of that name, or no process can be started.
    """
    if config.shadow_scheduler is None:
        return None
    try:
        return cast("ShadowSource", import_module(SHADOW).start_shadow(config.shadow_scheduler, header))
    except ImportError as error:
        raise EngineStartError("--shadow-scheduler needs the package llmstack-insight") from error
    except (ValueError, OSError) as error:
        raise EngineStartError(f"--shadow-scheduler: {error}") from error


def open_step_log(config: EngineConfig, header: LogHeader, follower: ShadowSource | None = None) -> DeferredLog | None:
    """The log of steps as configured: in a file, or the last of it in memory, or none. `follower` receives it too.

    Raises:
        EngineStartError: The file cannot be written.
    """
    if config.record_steps is None:
        is_needed = config.step_log_bytes or follower is not None
        if not is_needed:
            return None
        sink: Sink = RingSink(config.step_log_bytes)
        snapshot_steps = config.snapshot_steps if config.step_log_bytes else 0
    else:
        try:
            sink, snapshot_steps = FileSink(config.record_steps), config.snapshot_steps
        except OSError as error:
            raise EngineStartError(f"cannot write --record-steps {config.record_steps}: {error.strerror}") from error
    return DeferredLog(StepLog(header, sink, follower, snapshot_steps))
