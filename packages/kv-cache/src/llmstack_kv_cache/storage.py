"""The tensors that hold keys and values; needs the extra `[torch]`."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch

_HUGE_PAGE_BYTES = 1 << 21


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
    """Blocks that each hold all layers together.

    So the blocks in use are one stretch of memory, and blocks that were never used take no RAM: in large pages, not
    even a page per layer. Decodes read large pages 1.04 to 1.09 times as fast (measured).
    """
    whole_shape = (shape[0], num_layers, 2, *shape[1:])
    blocks = _zeros_in_huge_pages(math.prod(whole_shape), dtype).view(whole_shape)
    return [(blocks[:, layer, 0], blocks[:, layer, 1]) for layer in range(num_layers)]


def _zeros_in_huge_pages(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Fresh anonymous memory, which the system clears page by page at the first use; torch.zeros writes all of it."""
    num_bytes = num_elements * dtype.itemsize
    has_huge_pages = num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
    # One page more, for alignment; it is never used.
    spare_bytes = _HUGE_PAGE_BYTES if has_huge_pages else 0
    buffer = mmap.mmap(-1, num_bytes + spare_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(buffer, dtype=torch.uint8)
    start = 0
    if has_huge_pages:
        with suppress(OSError):  # a kernel without them
            buffer.madvise(mmap.MADV_HUGEPAGE)
        start = -memory.data_ptr() % _HUGE_PAGE_BYTES
    return memory[start : start + num_bytes].view(dtype)
