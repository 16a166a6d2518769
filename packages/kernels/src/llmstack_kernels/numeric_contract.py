"""The numeric contract: bit-equal results for any batching and chunking.

Native code keeps this by construction: every sum is taken in an order that depends on its own length alone. So do the
Triton kernels that treat each row, or each number, by itself; linear layers do where they were packed for it, and
attention where it computes decodes as it does prompts (`decodes_as_prefills`). Quantized layers are no exception: where
they are not computed from their small numbers, they are widened to a layer like any.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmstack_kernels.dispatch import TRITON, implementation
from llmstack_kernels.key_selection.native import supports_head_dim as supports_index_dim
from llmstack_kernels.paged_attention.native import supports_head_dim

_NATIVE = "native"
_BY_ROWS = (_NATIVE, TRITON)
_SPEED = {
    "linear": "linear layers are packed for speed",
    "paged_attention": "attention computes decodes faster than prompts, and in another order",
}
_OP_TO_KEEPERS = {
    "activation": _BY_ROWS,
    "layer_norm": _BY_ROWS,
    "linear": (_NATIVE,),
    "paged_attention": (_NATIVE,),
    "rms_norm": _BY_ROWS,
    "rotary_embedding": _BY_ROWS,
}
_STATE_OP_TO_KEEPERS = dict.fromkeys(
    ("causal_convolution", "gated_delta_rule", "selective_scan", "state_space_scan"), (_NATIVE,)
)
_SELECTION_TO_KEEPERS = {"key_selection": (_NATIVE,)}


def find_breaches(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    is_batch_invariant: bool = False,
    has_states: bool = False,
    index_dim: int = 0,
) -> Iterator[str]:
    """The operations that break the contract for a decoder on a type of device; none if it holds.

    `is_batch_invariant` is what its linear layers were packed with, and its attention is called with. `has_states`:
    Some of its layers keep a state of all tokens. `head_dim`: 0 for a model without attention. `index_dim`: Numbers of
    an indexer's key; 0 without one.
    """
    ops = _OP_TO_KEEPERS | (_STATE_OP_TO_KEEPERS if has_states else {})
    for op, keepers in (ops | (_SELECTION_TO_KEEPERS if index_dim else {})).items():
        backend = _backend(op, device_type)
        if backend == TRITON and op in _SPEED:
            if not is_batch_invariant:
                yield _SPEED[op]
        elif backend not in keepers:
            yield f"{op} runs in {'Triton' if backend == TRITON else 'PyTorch'}"
    if head_dim and _backend("paged_attention", device_type) == _NATIVE and not supports_head_dim(head_dim):
        yield f"attention with a head_dim of {head_dim} runs in PyTorch"
    if index_dim and _backend("key_selection", device_type) == _NATIVE and not supports_index_dim(index_dim):
        yield f"an indexer with keys of {index_dim} numbers runs in PyTorch"


def _backend(op: str, device_type: str) -> str:
    return implementation(op, device_type).__name__.rpartition(".")[2]
