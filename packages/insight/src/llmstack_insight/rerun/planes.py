"""Control planes to compare: the recorded one, and changes of it by name."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from llmstack_core_scheduler import KVCacheManager, SchedulerConfig
from llmstack_core_scheduler.request_queue import POLICIES
from llmstack_step_log.control_plane import CacheConfig, build_cache, build_scheduler
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types.plain_data import from_plain, to_plain

SchedulerFactory = Callable[[SchedulerConfig, KVCacheManager], Scheduler]

MAX_TEXT: Final = 512
_CLASS: Final = re.compile(r"[^\s:]+:[^\s:]+")


class PlaneError(ValueError):
    """The text names no control plane; one line, which says what does."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The configurations of a scheduler and of its cache, with the function that makes it.

    Attributes:
        factory: Makes the scheduler; None is the scheduler of these packages.
    """

    scheduler: SchedulerConfig
    cache: CacheConfig
    factory: SchedulerFactory | None = None

    def build(self) -> Scheduler:
        """A scheduler over an empty cache.

        Raises:
            ValueError: It cannot be built.
        """
        if self.factory is None:
            return build_scheduler(self.scheduler, self.cache)
        return self.factory(self.scheduler, build_cache(self.cache))


def recorded_plane(scheduler: SchedulerConfig, cache: CacheConfig) -> ControlPlane:
    """The control plane of a run."""
    return ControlPlane(scheduler, cache)


def changed_plane(plane: ControlPlane, text: str, *, imports: bool = True) -> ControlPlane:
    """Another control plane: a policy, settings such as `max_num_batched_tokens=512,num_blocks=100`, or `module:Class`.

    Settings may be separated by `,` or `|`. `imports`: Whether a class is imported; without, it is left away.

    Raises:
        PlaneError: There is no such setting or class, or its value is not valid.
    """
    if not text or len(text) > MAX_TEXT:
        raise PlaneError(f"must have 1 to {MAX_TEXT} characters")
    settings: list[str] = []
    factory, num_classes = plane.factory, 0
    for part in (part.strip() for part in text.replace("|", ",").split(",")):
        if part in POLICIES:
            settings.append(f"policy={part}")
        elif "=" in part.partition(":")[0]:
            settings.append(part)
        elif _CLASS.fullmatch(part):
            num_classes += 1
            factory = _load_factory(part) if imports else factory
        else:
            raise PlaneError(
                f"{part[:64]!r} is no policy ({', '.join(POLICIES)}), no setting such as max_num_batched_tokens=512, "
                "and no module:Class of a scheduler"
            )
    scheduler, cache = to_plain(plane.scheduler), to_plain(plane.cache)
    names = [_set(scheduler, cache, setting) for setting in settings]
    twice = "a class" if num_classes > 1 else next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PlaneError(f"{twice} is given twice")
    try:
        return ControlPlane(from_plain(SchedulerConfig, scheduler), from_plain(CacheConfig, cache), factory)
    except ValueError as error:
        raise PlaneError(str(error)) from error


def _set(scheduler: dict[str, Any], cache: dict[str, Any], setting: str) -> str:
    """Changes one setting, and returns its name."""
    name, _, text = setting.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    named = next((part for part in (scheduler, cache) if name in part), None)
    if named is None or not isinstance(named[name], bool | int | float | str):
        raise PlaneError(f"there is no setting {name[:64]!r}; there are {', '.join([*scheduler, *cache])}")
    named[name] = _parse(name, text.strip(), named[name])
    return name


def _parse(name: str, text: str, recorded: Any) -> Any:
    if isinstance(recorded, bool):
        if text not in ("true", "false"):
            raise PlaneError(f"{name} must be true or false, but is {text[:64]!r}")
        return text == "true"
    if isinstance(recorded, str):
        return text
    try:
        number = type(recorded)(text)
    except ValueError:
        raise PlaneError(f"{name} must be a number, but is {text[:64]!r}") from None
    if name in ("num_blocks", "block_size") and number < 1:
        raise PlaneError(f"{name} must be at least 1, but is {number}")
    return number


def _load_factory(target: str) -> SchedulerFactory:
    module_name, _, name = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlaneError(f"{target[:64]!r} cannot be imported: {error}") from error
    if not callable(factory):
        raise PlaneError(f"{target[:64]!r} cannot be called with a SchedulerConfig and a KVCacheManager")
    return cast("SchedulerFactory", factory)
