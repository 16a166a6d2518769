"""Structured output in the engine core, outside of scheduler and model runner."""

from llmstack_engine_core.structured_output.constrained_rows import ConstrainedRows, past_masks
from llmstack_engine_core.structured_output.grammar_gate import GrammarGate
from llmstack_engine_core.structured_output.lazy_backend import LazyBackend

__all__ = ["ConstrainedRows", "GrammarGate", "LazyBackend", "past_masks"]
