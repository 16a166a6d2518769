"""Whether results are bit-equal however tokens are batched and cut into steps, for the operations of a decoder.

Native code keeps this by construction: every sum is taken in an order that depends on its own length alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.linear import computes_quantized
from llmstack_kernels.paged_attention.native import supports_head_dim

_OPS = ("activation", "layer_norm", "linear", "paged_attention", "rms_norm", "rotary_embedding")
_KEEPERS = ("native",)


def find_breaches(
    device_type: str, dtype: torch.dtype, head_dim: int, quantization: str | None = None
) -> Iterator[str]:
    """What breaks the contract for a decoder on devices of a type; nothing where it holds."""
    for op in _OPS:
        backend = implementation(op, device_type).__name__.rpartition(".")[2]
        if backend not in _KEEPERS:
            yield f"{op} runs in PyTorch"
    if not supports_head_dim(head_dim):
        yield f"attention with a head_dim of {head_dim} runs in PyTorch"
    if quantization is not None and not computes_quantized(dtype, device_type):
        yield f"{quantization} layers of {str(dtype).removeprefix('torch.')} run in PyTorch"
