"""KV blocks of several ranks, as one piece of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from llmstack_parallel.errors import LostRankError
from llmstack_parallel.messages import BlockBytes, BlocksMessage, Message
from llmstack_parallel.topology import Topology
from llmstack_types import KVCacheSpec

PART_BYTES: Final = 64 * 2**20
"""Bytes of blocks in one message."""


class RankParts:
    """The parts of the ranks in the bytes of blocks.

    The stages follow each other, as their layers do. So the bytes of several stages of one rank are those of one
    process. Ranks that share layers follow each other within a stage.
    """

    def __init__(self, topology: Topology, bytes_per_block: Sequence[int], bytes_per_state: Sequence[int] = ()) -> None:
        """`bytes_per_block`: Of each rank, in the order of their numbers, and so of a state; empty without states."""
        self._bytes_per_block = bytes_per_block
        self._bytes_per_state = bytes_per_state or [0] * len(bytes_per_block)
        self._order = sorted(range(topology.num_ranks), key=lambda rank: (topology.stage(rank), rank))
        self._size = topology.tensor_parallel_size

    def form(self) -> tuple[int, int, str]:
        """Bytes of a block and of a state in all ranks, and what distinguishes them from those of one process."""
        form = f"parts of {self._size} ranks, {len(self._order) // self._size} stages" if self._size > 1 else ""
        return sum(self._bytes_per_block), sum(self._bytes_per_state), form

    @contextmanager
    def split(self, data: memoryview, num_blocks: int, *, has_state: bool = False) -> Iterator[dict[int, memoryview]]:
        """The part of each rank, as long as the context lasts: its blocks, and its part of a state if there is one.

        Raises:
            ValueError: The memory has another size.
        """
        sizes = [
            num_blocks * block + has_state * state
            for block, state in zip(self._bytes_per_block, self._bytes_per_state, strict=True)
        ]
        num_bytes = sum(sizes)
        if not num_bytes or data.nbytes != num_bytes:
            raise ValueError(f"{num_blocks} KV blocks have {num_bytes} bytes, but the memory has {data.nbytes}")
        parts: dict[int, memoryview] = {}
        start = 0
        for rank in self._order:
            end = start + sizes[rank]
            parts[rank] = data[start:end]
            start = end
        try:
            yield parts
        finally:  # a traceback that keeps them would keep the memory
            for part in parts.values():
                part.release()


def block_sizes(spec: KVCacheSpec) -> tuple[int, int]:
    """Bytes of a block and of a state of one rank; 0 where its stage has no layers of the kind."""
    return max((group.bytes_per_block for group in spec.kv_groups), default=0), spec.bytes_per_state


def writes(block_ids: Sequence[int], first: int, part: memoryview, state_id: int = 0) -> Iterator[BlocksMessage]:
    """The messages with the part of a rank."""
    for start in range(0, part.nbytes, PART_BYTES):
        data = part[start : start + PART_BYTES]
        yield BlocksMessage(tuple(block_ids), first, bytes(data), start + data.nbytes == part.nbytes, state_id)


def reads(data: bytearray) -> Iterator[BlockBytes]:
    """The answers with the part of a rank."""
    for start in range(0, len(data), PART_BYTES):
        yield BlockBytes(bytes(data[start : start + PART_BYTES]))


def receive_part(part: memoryview, receive: Callable[[], Message]) -> None:
    """Copies the answers of a rank into its part.

    Raises:
        LostRankError: The rank sent something else.
    """
    start = 0
    while start < part.nbytes:
        message = receive()
        if not isinstance(message, BlockBytes) or not 0 < len(message.data) <= part.nbytes - start:
            raise LostRankError(f"it sent a {type(message).__name__} in place of its KV blocks")
        part[start : start + len(message.data)] = message.data
        start += len(message.data)
