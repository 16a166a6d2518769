"""The tensors that hold keys and values; needs the extra `[torch]`."""

from __future__ import annotations

import math
import mmap

import torch


def allocate_kv_storage(
    num_layers: int,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Zeroed keys and values of each layer, each `[num_blocks, num_kv_heads, block_size, head_dim]`.

    Zeroed, since a kernel may multiply what it then masks out, and 0 times a NaN of old memory is a NaN.

    Raises:
        ValueError: A size is not positive; only `num_layers` may be 0, for a model without KV.
    """
    if num_layers < 0:
        raise ValueError(f"num_layers must be at least 0, got {num_layers}")
    sizes = {
        "num_blocks": num_blocks,
        "num_kv_heads": num_kv_heads,
        "block_size": block_size,
        "head_dim": head_dim,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return [(_zeros(shape, dtype, device), _zeros(shape, dtype, device)) for _ in range(num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Fresh anonymous memory is zero and takes no RAM until it is used; torch.zeros writes it all, a second per GB.
    buffer = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # No large pages: the first requests would wait for all of each to be cleared (50 ms for 900 tokens, measured).
    return torch.frombuffer(buffer, dtype=dtype).view(shape)
