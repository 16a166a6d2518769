"""Operations of a language model's forward pass, one folder each.

The function of an operation has its name: `from llmstack_kernels.rms_norm import rms_norm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmstack_kernels.dispatch import backends

__all__ = ["backends"]


def __getattr__(name: str) -> object:
    """`backends`, at its first use: `caches` is imported without PyTorch, which takes seconds."""
    if name != "backends":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llmstack_kernels.dispatch import backends

    return backends
