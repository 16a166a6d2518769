"""The engine core and its clients: schedule, execute, update, behind ZeroMQ.

Names are imported when they are first used: `llmstack --help` loads this package for the commands in it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmstack_core_scheduler import SchedulerConfig, SpeculativeConfig
    from llmstack_engine_core.build import build_engine_core
    from llmstack_engine_core.config import EngineConfig
    from llmstack_engine_core.engine_core import EngineCore
    from llmstack_engine_core.protocols import EventHook

_MODULES = {
    "EngineConfig": "llmstack_engine_core.config",
    "EngineCore": "llmstack_engine_core.engine_core",
    "EventHook": "llmstack_engine_core.protocols",
    "SchedulerConfig": "llmstack_core_scheduler",
    "SpeculativeConfig": "llmstack_core_scheduler",
    "build_engine_core": "llmstack_engine_core.build",
}

__all__ = ["EngineConfig", "EngineCore", "EventHook", "SchedulerConfig", "SpeculativeConfig", "build_engine_core"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
