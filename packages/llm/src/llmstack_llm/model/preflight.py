"""Checks of a model on this machine before an engine core starts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from llmstack_llm.model.config import ModelConfigError

if TYPE_CHECKING:
    from llmstack_engine_core import EngineConfig

_CHECKED_RUNNERS = ("default", "parallel")
_RUNNER_CHECKS = "llmstack_model_runner.preflight"
"""Found by name, as the runner itself is; the module needs no torch."""


def check_model_runs(config: EngineConfig) -> None:
    """Refuses a model that our own runners cannot run; other runners check their models themselves.

    Raises:
        ModelConfigError: The model cannot run on this machine; the text has a line for each reason.
    """
    if config.runner not in _CHECKED_RUNNERS:
        return
    try:
        checks = importlib.import_module(_RUNNER_CHECKS)
    except ImportError:  # without a runner the start fails with a sentence of its own
        return
    problems = checks.find_problems(
        config.model,
        num_blocks=config.num_blocks,
        kv_cache_bytes=config.kv_cache_bytes,
        is_max_model_len_explicit=config.is_max_model_len_explicit,
    )
    if problems:
        raise ModelConfigError("\n".join(problems))


def least_memory(config: EngineConfig) -> tuple[int, int, int]:
    """Lower bounds in bytes: of a model's processes, of its weights as they are loaded, of the keys of a token.

    Zeros for other runners than ours, which say nothing of it.

    Raises:
        ModelFilesError: Files of the model cannot be read.
    """
    if config.runner not in _CHECKED_RUNNERS:
        return 0, 0, 0
    try:
        checks = importlib.import_module(_RUNNER_CHECKS)
    except ImportError:
        return 0, 0, 0
    process_bytes, weight_bytes, token_bytes = checks.least_memory(config.model)
    return int(process_bytes), int(weight_bytes), int(token_bytes)


def find_memory_problem(config: EngineConfig) -> str:
    """Why another engine core does not fit into the memory that is free now; empty where it may.

    Only our own runners say what a model needs.
    """
    if config.runner not in _CHECKED_RUNNERS:
        return ""
    try:
        checks = importlib.import_module(_RUNNER_CHECKS)
    except ImportError:
        return ""
    found = checks.find_room_problem(config.model, num_blocks=config.num_blocks, kv_cache_bytes=config.kv_cache_bytes)
    return str(found)
