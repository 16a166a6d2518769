"""Exchange between the ranks of one host over shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmstack_kernels.collective import SharedGroup, SharedLink
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_parallel.collectives.rank_part import rank_part
from llmstack_parallel.segments import RankSegments, map_segment
from llmstack_parallel.topology import Topology


class SharedMemoryLinks:
    """The links of one rank to the same place of the neighbouring stages."""

    def __init__(self, before: SharedLink | None, after: SharedLink | None) -> None:
        self._before, self._after = before, after
        self._received: Sequence[torch.Tensor] = ()
        self._is_repeated = False

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sends to the next stage."""
        if self._after is None:
            raise RuntimeError("the last stage sends nothing")
        for tensor in tensors:
            self._after.send(tensor.contiguous())

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fills tensors from the stage before."""
        if self._before is None:
            raise RuntimeError("the first stage receives nothing")
        if self._is_repeated:
            for tensor, received in zip(tensors, self._received, strict=True):
                tensor.copy_(received)
        else:
            for tensor in tensors:
                self._before.receive(tensor)
        self._received, self._is_repeated = tensors, False

    def receive_again(self) -> None:
        """The next `receive` gives what the last one gave."""
        self._is_repeated = bool(self._received)


class SharedMemoryExchange:
    """All that one rank has mapped."""

    def __init__(self, topology: Topology, rank: int, segments: RankSegments) -> None:
        tp_size = topology.tensor_parallel_size
        num_slots, link_bytes = segments.num_link_slots, SharedLink.num_bytes(segments.num_link_slots)
        self._group: SharedGroup | None = None
        if segments.group >= 0:
            memory = map_segment(segments.group, SharedGroup.num_bytes(tp_size))
            self._group = SharedGroup(memory, topology.place(rank), tp_size)
        before, after = (
            SharedLink(map_segment(fd, link_bytes), is_sender=is_sender, num_slots=num_slots) if fd >= 0 else None
            for fd, is_sender in ((segments.before, False), (segments.after, True))
        )
        self._links = SharedMemoryLinks(before, after)
        self._parts = [part for part in (self._group, before, after) if part is not None]
        self._topology, self._rank = topology, rank

    def sharding(self, *, is_expert_parallel: bool) -> Sharding:
        """The rank's part of a model."""
        own = (self._topology, self._rank, self._group, self._links)
        return rank_part(*own, is_expert_parallel=is_expert_parallel)

    def set_timeout(self, timeout_s: float) -> None:
        """Limits each later wait for another rank."""
        for part in self._parts:
            part.set_timeout(timeout_s)

    def check(self) -> None:
        """Raises CollectiveError if an exchange has failed, also one that was replayed."""
        for part in self._parts:
            part.check()

    def abort(self) -> None:
        """Ends all waits, here and in the other ranks; from any thread."""
        for part in self._parts:
            part.abort()

    def close(self) -> None:
        """Does nothing: the memory goes with the last rank."""
