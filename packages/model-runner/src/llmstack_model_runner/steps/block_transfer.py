"""KV blocks in their canonical form, to and from other processes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from llmstack_model_runner.memory.block_copies import flat_storage, num_blocks_of
from llmstack_model_runner.steps.recovery import StepRecovery


class BlockTransfer:
    """Hands out the KV blocks of one storage, and takes those of another one.

    The form of blocks: for each layer its tensors, such as keys, then values, each `[block, kv_head, slot, dim]`, as
    the storage has them. Behind them may be a state: for each layer with one its tensors.
    Copies run in order with the steps, on PyTorch's current stream.
    """

    def __init__(
        self,
        kv_caches: Sequence[tuple[torch.Tensor, ...]],
        recovery: StepRecovery,
        device: torch.device,
        states: Sequence[tuple[torch.Tensor, ...]] = (),
    ) -> None:
        """`recovery` learns which blocks are written."""
        self._kv_caches, self._states = list(kv_caches), list(states)
        self._recovery = recovery
        self._device = device

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a block, of all layers, and of a state."""
        block, state = (
            sum(tensor[0].nbytes for tensor in flat_storage(layers)) for layers in (self._kv_caches, self._states)
        )
        return block, state

    @torch.inference_mode()
    def read(self, block_ids: Sequence[int], out: memoryview, state_id: int = 0) -> None:
        """Copies blocks into `out`, which it does not keep, and a state unless it is 0.

        Raises:
            ValueError: A block does not exist, or `out` has another size.
        """
        for tensor, indices, piece in self._parts(block_ids, out, 0, state_id):
            piece.copy_(tensor.index_select(0, indices))

    @torch.inference_mode()
    def write(self, block_ids: Sequence[int], data: memoryview, first: int = 0, state_id: int = 0) -> None:
        """Copies the last blocks of `data`, from number `first` on, into these blocks, and a state unless it is 0.

        Raises:
            ValueError: A block does not exist, or `data` has another size; nothing has been copied.
        """
        for tensor, indices, piece in self._parts(block_ids, data, first, state_id):
            tensor.index_copy_(0, indices, piece[len(piece) - len(indices) :].to(tensor.device))
        self._recovery.unwritten.note_written(block_ids)
        self._recovery.unwritten.states.pop(state_id, None)

    def _parts(
        self, block_ids: Sequence[int], data: memoryview, first: int, state_id: int
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each tensor of the storage, the numbers of its blocks, and its part of `data`, which the views share.

        `first`: Blocks of `data` before those of `block_ids`.
        """
        state_ids = [state_id] if state_id else []
        num_blocks, (block_bytes, state_bytes) = first + len(block_ids), self.sizes
        num_bytes = num_blocks * block_bytes + len(state_ids) * state_bytes
        if not num_bytes or data.nbytes != num_bytes:
            raise ValueError(f"{num_blocks} KV blocks have {num_bytes} bytes, but the memory has {data.nbytes}")
        parts, start = [], 0
        for layers, ids, count in (
            (self._kv_caches, block_ids, num_blocks), (self._states, state_ids, len(state_ids)),
        ):  # fmt: skip
            storage = flat_storage(layers)
            if storage and not all(0 <= block_id < num_blocks_of(storage) for block_id in ids):
                raise ValueError("a KV block does not exist")
            indices = torch.tensor(ids, dtype=torch.int64, device=self._device)
            for tensor in storage if count else []:
                shape = (count, *tensor.shape[1:])
                piece = torch.frombuffer(data, dtype=tensor.dtype, count=math.prod(shape), offset=start).view(shape)
                parts.append((tensor, indices, piece))
                start += piece.nbytes
        return parts
