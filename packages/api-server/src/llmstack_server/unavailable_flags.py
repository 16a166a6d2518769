"""Flags of vLLM that do nothing here yet: refused by name, so that nobody believes one took effect."""

from __future__ import annotations

_FLAGS = """
"""

NOT_AVAILABLE = frozenset(_FLAGS.split())
