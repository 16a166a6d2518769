"""Alternatives to compare a logged run with.

A policy, a changed setting, another scheduler, or another installation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from llmstack_core_scheduler import KVCacheManager, SchedulerConfig
from llmstack_core_scheduler.request_queue import POLICIES
from llmstack_step_log import LogHeader, RecordedRun, StepLogError
from llmstack_step_log.control_plane import build_cache
from llmstack_step_log.replay.derive import Decision, derive_decisions
from llmstack_step_log.replay.installation import derive_with_installation
from llmstack_step_log.scheduler_protocol import Scheduler

SchedulerFactory = Callable[[SchedulerConfig, KVCacheManager], Scheduler]


class AgainstError(StepLogError):
    """A wrong value of `--against`; the text says which values are possible."""


def decisions_as_recorded(run: RecordedRun) -> Iterator[Decision]:
    """The run's own decisions."""
    return _decisions(run, run.header.build_scheduler())


def decisions_against(run: RecordedRun, path: Path, against: str) -> Iterator[Decision]:
    """The decisions of `against` on the same inputs; `path` is the run's file, for another process to read.

    Raises:
        AgainstError: It is nothing to compare with.
        StepLogError: The changed configuration is not valid.
    """
    if against in POLICIES:
        return _with_settings(run, f"policy={against}")
    if Path(against).exists():
        return derive_with_installation(path, Path(against), run.without_snapshots() if run.header.marker else None)
    if "=" in against:
        return _with_settings(run, against)
    if ":" in against:
        return _decisions(run, _load_factory(against)(*_scheduler_arguments(run)))
    raise AgainstError(
        f"{against[:64]!r} is no policy ({', '.join(POLICIES)}), no setting such as max_num_batched_tokens=512, no "
        "module:Class and no path; for a released version give the folder of `pip install --target FOLDER`, or wheels"
    )


def _decisions(run: RecordedRun, scheduler: Scheduler) -> Iterator[Decision]:
    return (item for item in derive_decisions(run.events(), scheduler) if isinstance(item, Decision))


def _with_settings(run: RecordedRun, settings: str) -> Iterator[Decision]:
    scheduler, cache = dict(run.header.scheduler), dict(run.header.cache)
    for setting in settings.split(","):
        name, _, text = setting.strip().partition("=")
        named = next((part for part in (scheduler, cache) if name in part), None)
        if named is None:
            known = ", ".join([*scheduler, *cache])
            raise AgainstError(f"there is no setting {name[:64]!r}; the run has {known}")
        named[name] = _parse(name, text, named[name])
    return _decisions(run, LogHeader(scheduler, cache).build_scheduler())


def _parse(name: str, text: str, recorded: object) -> Any:
    if isinstance(recorded, bool):
        if text not in ("true", "false"):
            raise AgainstError(f"{name} must be true or false, but is {text[:64]!r}")
        return text == "true"
    try:
        return type(recorded)(text) if isinstance(recorded, int | float) else text
    except ValueError:
        raise AgainstError(f"{name} must be a number, but is {text[:64]!r}") from None


def _load_factory(target: str) -> SchedulerFactory:
    module_name, _, name = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise AgainstError(f"{target[:64]!r} cannot be imported: {error}") from error
    if not callable(factory):
        raise AgainstError(f"{target[:64]!r} cannot be called with a SchedulerConfig and a KVCacheManager")
    return cast("SchedulerFactory", factory)


def _scheduler_arguments(run: RecordedRun) -> tuple[SchedulerConfig, KVCacheManager]:
    scheduler, cache = run.header.configs()
    return scheduler, build_cache(cache)
