"""How much memory KV storage may take on a CPU, and giving memory back on any device."""

from __future__ import annotations

import ctypes
import gc
import sys

import torch

from llmstack_model_runner.host_limits import available_memory_bytes

_MAX_HOST_KV_BYTES = 4 << 30
_HOST_SHARE = 0.4
_LOGITS_COPIES = 4
"""The sampler holds a few float32 tensors of the size of the logits at once."""


def host_kv_bytes(available_bytes: int | None) -> int:
    """The default on a CPU, whose memory other processes need too: 40 % of what is available, at most 4 GiB."""
    if available_bytes is None:
        return _MAX_HOST_KV_BYTES
    return min(_MAX_HOST_KV_BYTES, int(available_bytes * _HOST_SHARE))


def available_host_kv_bytes() -> int:
    """Memory that KV storage may take now, after the weights are loaded, unless the user asks for more."""
    return host_kv_bytes(available_memory_bytes())


def obtainable_host_kv_bytes(working_bytes: int) -> int:
    """All the memory that KV storage could have now; what nothing bounds is without end.

    `working_bytes`: What a step needs beside weights and KV storage.
    """
    available_bytes = available_memory_bytes()
    return sys.maxsize if available_bytes is None else max(0, available_bytes - working_bytes)


def return_freed_memory(device: torch.device) -> None:
    """Gives what is no longer used back to the system, rather than keeping it for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc's
        libc.malloc_trim(0)


def working_bytes(max_num_batched_tokens: int, max_num_logits: int, vocab_size: int, token_bytes: int) -> int:
    """A generous estimate of a step's activations and logits.

    Args:
        max_num_batched_tokens: Tokens in a step.
        max_num_logits: Tokens with logits in a step.
        vocab_size: Width of the logits.
        token_bytes: Bytes of one token's keys and values in all layers; a layer's activations are taken as that large.
    """
    return max_num_batched_tokens * token_bytes + _LOGITS_COPIES * max_num_logits * vocab_size * 4
