"""Model runners by name: an entry point, or `module:Class`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from llmstack_types import EngineStartError

if TYPE_CHECKING:
    from llmstack_engine_core.protocols import ModelRunner
    from llmstack_types import ModelRunnerConfig

ENTRY_POINT_GROUP = "llmstack.model_runners"
# Names of our own. They need no search of installed distributions, which sources on PYTHONPATH have not anyway.
OWN_RUNNERS = {
    "default": "llmstack_model_runner.model_runner:ModelRunner",
    "parallel": "llmstack_parallel.runner:ParallelRunner",
    "echo": "llmstack_engine_core.testing:EchoModelRunner",
}
_TORCH_RUNNERS = ("default", "parallel")
_READ_AHEAD, _LEAN_TORCH = "llmstack_model_runner.read_ahead", "llmstack_model_runner.lean_torch"
"""Found by name, as the runners are; the modules need no torch."""
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


def import_lean_torch(name: str) -> None:
    """Imports what a runner of our own needs of PyTorch, in a process that has no other use for it."""
    if name in _TORCH_RUNNERS:
        with contextlib.suppress(ImportError):  # without the runner, the start fails with a sentence of its own
            importlib.import_module(_LEAN_TORCH).import_lean()


def read_ahead(name: str, config: ModelRunnerConfig) -> None:
    """Lets a runner of our own begin to read the model's files, before its process has imported it."""
    if name not in _TORCH_RUNNERS:
        return
    with contextlib.suppress(ImportError):  # without the runner, the start fails with a sentence of its own
        importlib.import_module(_READ_AHEAD).start_reading(config)


def _resolve(name: str) -> str:
    if name in OWN_RUNNERS:
        return OWN_RUNNERS[name]
    from importlib.metadata import entry_points  # it takes longer to import than all else here

    installed = {entry_point.name: entry_point.value for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        known = ", ".join(sorted(installed | OWN_RUNNERS))
        raise EngineStartError(f"there is no model runner {name[:64]!r}; known are {known}, or give module:Class")
    return installed[name]
