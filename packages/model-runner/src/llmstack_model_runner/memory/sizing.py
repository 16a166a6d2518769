"""Memory sizes on a CPU, and release of freed memory on any device."""

from __future__ import annotations

import ctypes
import gc
import sys

import torch

from llmstack_model_runner.device.host_limits import available_memory_bytes
from llmstack_model_runner.media.encoder import MediaEncoder
from llmstack_model_runner.memory.kv_cache_groups import num_blocks_needed, token_bytes
from llmstack_types import KVCacheSpec, ModelRunnerConfig

_MAX_HOST_KV_BYTES = 4 << 30
_HOST_SHARE = 0.4
MIN_TRIMMED_BYTES = 64 << 20
MAX_FREE_HEAP_BYTES = 128 << 20
"""Freed memory that a CPU's steps keep for the next ones."""
_LARGEST_HEAP_PIECE_BYTES = 32 << 20  # glibc allows no more
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LOGITS_COPIES = 4
"""Number of float32 tensors of the size of the logits that the sampler holds at once."""


def host_kv_bytes(available_bytes: int | None) -> int:
    """Default size of the KV cache on a CPU, whose memory is shared: 40 % of what is available, at most 4 GiB."""
    if available_bytes is None:
        return _MAX_HOST_KV_BYTES
    return min(_MAX_HOST_KV_BYTES, int(available_bytes * _HOST_SHARE))


def available_host_kv_bytes(other_bytes: int = 0) -> int:
    """Default size of the KV cache, measured after the weights are loaded; `other_bytes` will be used soon."""
    available_bytes = available_memory_bytes()
    return host_kv_bytes(None if available_bytes is None else max(0, available_bytes - other_bytes))


def obtainable_host_kv_bytes(working_bytes: int) -> int:
    """The most memory that the KV cache could use now; `sys.maxsize` if the system reports no limit.

    `working_bytes`: Memory that a step needs besides weights and KV cache.
    """
    available_bytes = available_memory_bytes()
    return sys.maxsize if available_bytes is None else max(0, available_bytes - working_bytes)


def return_freed_memory(device: torch.device) -> None:
    """Returns freed memory to the system instead of keeping it in allocators."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc's
        libc.malloc_trim(0)


def settle_heap(device: torch.device, num_weight_bytes: int) -> None:
    """Returns to the system what loading on a CPU has freed, and keeps what the operations of steps will free.

    Packing GPT-2's shape frees 97 MiB; small models leave little. Memory of activations that were returned after each
    operation would be touched for the first time again: 20 MB and 5 % of the time, for a prompt of 900 tokens.
    """
    if device.type != "cpu":
        return
    if num_weight_bytes >= MIN_TRIMMED_BYTES:
        return_freed_memory(device)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc's
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_PIECE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, MAX_FREE_HEAP_BYTES)


def working_bytes(max_num_batched_tokens: int, max_num_logits: int, vocab_size: int, token_bytes: int) -> int:
    """Upper estimate of a step's activations and logits in bytes.

    Args:
        max_num_batched_tokens: Tokens in a step.
        max_num_logits: Tokens with logits in a step.
        vocab_size: Width of the logits.
        token_bytes: Bytes of one token's keys and values in all layers, also the estimate for a layer's activations.
    """
    return max_num_batched_tokens * token_bytes + _LOGITS_COPIES * max_num_logits * vocab_size * 4


def cached_vectors(config: ModelRunnerConfig, spec: KVCacheSpec) -> int:
    """Vectors of items that there is room for; 0 for a model that takes tokens only."""
    if spec.media is None:
        return 0
    return spec.media.num_cache_tokens(config.encoder_cache_tokens, config.max_num_batched_tokens)


def media_bytes(config: ModelRunnerConfig, spec: KVCacheSpec, encoder: MediaEncoder | None) -> int:
    """Memory for the vectors of items, and for one item that is being encoded; 0 for a model that takes tokens only."""
    media, dtype = spec.media, getattr(torch, spec.dtype)
    if media is None:
        return 0
    num_vectors, vector_bytes = cached_vectors(config, spec), media.vector_size * int(dtype.itemsize)
    if encoder is None:
        return num_vectors * vector_bytes
    return num_vectors * vector_bytes * (1 + encoder.num_deep) + encoder.work_bytes


def largest_rows(spec: KVCacheSpec, max_num_seqs: int, most_state_bytes: int) -> tuple[int, int]:
    """The most rows of a step whose states fit, and the state blocks that one such step needs; 0 without states."""
    if not spec.bytes_per_state:
        return max_num_seqs, 0
    num_rows = max(spec.num_rows_with_states(most_state_bytes // spec.bytes_per_state, max_num_seqs), 1)
    return num_rows, 1 + num_rows


def host_kv_bytes_of(config: ModelRunnerConfig, spec: KVCacheSpec, *, is_size_given: bool, other_bytes: int = 0) -> int:
    """Memory for one process's KV cache on a CPU, which it shares with the other processes of the model.

    With a size given by the user this is all available memory, else a share of it, at most what all rows need at full
    length. `other_bytes` are needed besides weights and steps.
    """
    max_num_logits = config.max_num_logits or config.max_num_seqs * (1 + config.max_num_drafts)
    num_logits = min(max_num_logits, config.max_num_batched_tokens)
    step_bytes = working_bytes(config.max_num_batched_tokens, num_logits, spec.vocab_size, token_bytes(spec))
    if is_size_given:
        return obtainable_host_kv_bytes(step_bytes + other_bytes) // config.num_processes
    num_row_blocks = num_blocks_needed(spec, config.max_model_len, config.max_num_batched_tokens)
    num_blocks = config.max_num_seqs * num_row_blocks
    needed_bytes = spec.num_cache_bytes(num_blocks, spec.num_useful_states(num_blocks, config.max_num_seqs))
    return min(needed_bytes, available_host_kv_bytes(other_bytes) // config.num_processes)
