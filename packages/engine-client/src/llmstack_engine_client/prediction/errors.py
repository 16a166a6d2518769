"""The error of a trace, a cost model or a setting that predictions cannot use."""

from __future__ import annotations

from llmstack_types import LLMStackError


class SimulationError(LLMStackError, ValueError):
    """A trace, a cost model or a setting cannot be used; the text says why in one line."""
