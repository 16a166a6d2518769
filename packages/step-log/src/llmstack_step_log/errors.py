"""Errors of reading a step log."""

from __future__ import annotations

from llmstack_types import LLMStackError


class StepLogError(LLMStackError, ValueError):
    """A file that is no log of steps, or a damaged one; the text says so in one line."""
