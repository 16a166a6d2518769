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

    A block of a tensor is contiguous. On a CPU neighbouring blocks are apart, since all layers share the memory.

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
    if torch.device(device).type == "cpu":
        return _allocate_on_host(num_layers, shape, dtype) if num_layers else []

    def allocate() -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return [(allocate(), allocate()) for _ in range(num_layers)]


def _allocate_on_host(
    num_layers: int, shape: tuple[int, ...], dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Blocks that each hold all layers together, so that the blocks in use are one stretch of memory.

    It is fresh anonymous memory, which the system clears page by page at the first use: torch.zeros writes all of it.
    Large pages are not asked for. Decodes read them 1.05 to 1.10 times as fast, but a server's first requests waited
    longer while they were cleared (measured).
    """
    whole_shape = (shape[0], num_layers, 2, *shape[1:])
    num_elements = math.prod(whole_shape)
    buffer = mmap.mmap(-1, num_elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    blocks = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(whole_shape)
    return [(blocks[:, layer, 0], blocks[:, layer, 1]) for layer in range(num_layers)]
