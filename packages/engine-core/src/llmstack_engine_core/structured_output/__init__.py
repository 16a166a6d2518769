"""Structured output around a scheduler and a model runner: neither knows of grammars."""

from llmstack_engine_core.structured_output.compiling_scheduler import CompilingScheduler
from llmstack_engine_core.structured_output.constrained_runner import ConstrainedRunner
from llmstack_engine_core.structured_output.lazy_backend import LazyBackend

__all__ = ["CompilingScheduler", "ConstrainedRunner", "LazyBackend"]
