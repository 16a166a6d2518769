"""KV blocks in their canonical form, to and from other processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmstack_model_runner.memory.block_copies import flat_storage, num_blocks_of
from llmstack_model_runner.steps.recovery import StepRecovery


class BlockTransfer:
    """Hands out the KV blocks of one storage, and takes those of another one.

    The form of blocks: for each layer its tensors, such as keys, then values, each `[block, kv_head, slot, dim]`, as
    the storage has them.
    Copies run in order with the steps, on PyTorch's current stream.
    """

    def __init__(self, kv_caches: list[tuple[torch.Tensor, ...]], recovery: StepRecovery, device: torch.device) -> None:
        """`recovery` learns which blocks are written."""
        self._kv_caches = kv_caches
        self._recovery = recovery
        self._device = device

    @property
    def num_block_bytes(self) -> int:
        """Bytes of a block, of all layers."""
        return sum(tensor[0].nbytes for tensor in flat_storage(self._kv_caches))

    @torch.inference_mode()
    def read(self, block_ids: Sequence[int], out: memoryview) -> None:
        """Copies blocks into `out`, which it does not keep.

        Raises:
            ValueError: A block does not exist, or `out` has another size.
        """
        storage = flat_storage(self._kv_caches)
        pieces = _pieces(storage, out, len(block_ids))
        indices = self._indices(storage, block_ids)
        for tensor, piece in zip(storage, pieces, strict=True):
            piece.copy_(tensor.index_select(0, indices))

    @torch.inference_mode()
    def write(self, block_ids: Sequence[int], data: memoryview, first: int = 0) -> None:
        """Copies the last blocks of `data`, from number `first` on, into these blocks.

        Raises:
            ValueError: A block does not exist, or `data` has another size; nothing has been copied.
        """
        storage = flat_storage(self._kv_caches)
        pieces = _pieces(storage, data, first + len(block_ids))
        indices = self._indices(storage, block_ids)
        for tensor, piece in zip(storage, pieces, strict=True):
            tensor.index_copy_(0, indices, piece[first:].to(tensor.device))
        self._recovery.unwritten.note_written(block_ids)

    def _indices(self, storage: Sequence[torch.Tensor], block_ids: Sequence[int]) -> torch.Tensor:
        if not all(0 <= block_id < num_blocks_of(storage) for block_id in block_ids):
            raise ValueError("a KV block does not exist")
        return torch.tensor(block_ids, dtype=torch.int64, device=self._device)


def _pieces(storage: Sequence[torch.Tensor], data: memoryview, num_blocks: int) -> list[torch.Tensor]:
    """The blocks of each tensor of the storage in `data`, which the views share."""
    num_bytes = sum(tensor[0].nbytes for tensor in storage) * num_blocks
    if not num_bytes or data.nbytes != num_bytes:
        raise ValueError(f"{num_blocks} KV blocks have {num_bytes} bytes, but the memory has {data.nbytes}")
    pieces, start = [], 0
    for tensor in storage:
        count = tensor[0].numel() * num_blocks
        piece = torch.frombuffer(data, dtype=tensor.dtype, count=count, offset=start)
        pieces.append(piece.view(num_blocks, *tensor.shape[1:]))
        start += piece.nbytes
    return pieces
