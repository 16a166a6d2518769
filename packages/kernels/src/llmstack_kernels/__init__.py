"""Operations of a language model's forward pass, one folder each.

The function of an operation has its name: `from llmstack_kernels.rms_norm import rms_norm`.
"""

from llmstack_kernels.dispatch import backends

__all__ = ["backends"]
