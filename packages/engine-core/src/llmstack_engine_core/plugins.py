"""Model runners by name: an entry point, or `module:Class`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

from llmstack_engine_core.protocols import ModelRunner
from llmstack_types import EngineStartError, ModelRunnerConfig

ENTRY_POINT_GROUP = "llmstack.model_runners"
# Entry points are a fact about installed distributions; sources on PYTHONPATH have none.
WITHOUT_ENTRY_POINT = {
    "default": "llmstack_model_runner.model_runner:ModelRunner",
    "parallel": "llmstack_parallel.runner:ParallelRunner",
    "echo": "llmstack_engine_core.testing:EchoModelRunner",
}
RUNNER_METHODS = (
    "load_model", "kv_cache_spec", "available_kv_bytes", "initialize_kv_cache", "execute_model", "backends", "shutdown",
)  # fmt: skip


def load_model_runner(name: str) -> Callable[[ModelRunnerConfig], ModelRunner]:
    """Imports the model runner class of that name.

    Raises:
        EngineStartError: There is none, or it cannot be imported.
    """
    target = name if ":" in name else _resolve(name)
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EngineStartError(f"model runner {name[:64]!r} cannot be imported: {error}") from error
    runner_class = getattr(module, class_name, None)
    missing = [method for method in RUNNER_METHODS if not callable(getattr(runner_class, method, None))]
    if not isinstance(runner_class, type) or missing:
        raise EngineStartError(f"{target[:128]!r} is not a model runner class: it lacks {', '.join(missing)}")
    return cast("Callable[[ModelRunnerConfig], ModelRunner]", runner_class)


def _resolve(name: str) -> str:
    installed = {entry_point.name: entry_point.value for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    target = installed.get(name) or WITHOUT_ENTRY_POINT.get(name)
    if target is None:
        known = ", ".join(sorted(installed | WITHOUT_ENTRY_POINT))
        raise EngineStartError(f"there is no model runner {name[:64]!r}; known are {known}, or give module:Class")
    return target
