"""Construction of models with or without the layer that guesses one more token.

As with `sharding`, the choice is a context around construction, so no model's constructor needs a parameter for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_has_draft_head: ContextVar[bool] = ContextVar("_has_draft_head", default=False)


@contextmanager
def draft_heads(are_needed: bool) -> Iterator[None]:
    """Models that are constructed inside the block have their draft head, or have none."""
    token = _has_draft_head.set(are_needed)
    try:
        yield
    finally:
        _has_draft_head.reset(token)


def needs_draft_head() -> bool:
    """Whether a model in this context is to have its draft head."""
    return _has_draft_head.get()
