"""Shared memory of the ranks: segments without a name, passed on as descriptors."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

from llmstack_kernels.collective import LINK_SLOT_BYTES, SharedGroup, SharedLink
from llmstack_kernels.native import is_available
from llmstack_parallel.topology import Topology

MAX_LINK_BYTES = 256 << 20
_NONE = -1


def can_share_memory() -> bool:
    """Whether ranks on this machine can exchange data over shared memory."""
    return hasattr(os, "memfd_create") and is_available()


@dataclass(frozen=True, slots=True)
class RankSegments:
    """Descriptors of the segments of one rank; -1 where it has none.

    Attributes:
        group: For the ranks of its stage.
        before: A link from the stage before.
        after: A link to the stage after.
        num_link_slots: Pieces that a link holds.
    """

    group: int
    before: int
    after: int
    num_link_slots: int

    @property
    def descriptors(self) -> list[int]:
        return [fd for fd in (self.group, self.before, self.after) if fd != _NONE]


class Segments:
    """All segments of a topology. Their memory is returned when the last process that has mapped it ends."""

    def __init__(self, topology: Topology, step_bytes: int) -> None:
        """`step_bytes`: States of the largest step, of which a link holds two, within `MAX_LINK_BYTES`."""
        self._topology = topology
        num_slots = max(16, min(2 * step_bytes, MAX_LINK_BYTES) // LINK_SLOT_BYTES + 2)
        self._num_link_slots = num_slots
        tp_size, num_stages = topology.tensor_parallel_size, topology.pipeline_parallel_size
        self._stage_to_group: dict[int, int] = {}
        self._links: dict[tuple[int, int], int] = {}  # by the stage that receives, and the place in it
        try:
            if tp_size > 1:
                for stage in range(num_stages):
                    self._stage_to_group[stage] = _make(SharedGroup.num_bytes(tp_size))
            for stage in range(1, num_stages):
                for place in range(tp_size):
                    self._links[stage, place] = _make(SharedLink.num_bytes(num_slots))
        except OSError:
            self.close()
            raise

    def of_rank(self, rank: int) -> RankSegments:
        """The shared memory that one rank maps."""
        stage, place = self._topology.stage(rank), self._topology.place(rank)
        return RankSegments(
            self._stage_to_group.get(stage, _NONE),
            self._links.get((stage, place), _NONE),
            self._links.get((stage + 1, place), _NONE),
            self._num_link_slots,
        )

    def close(self) -> None:
        """Closes the descriptors; what is mapped stays."""
        for fd in [*self._stage_to_group.values(), *self._links.values()]:
            os.close(fd)
        self._stage_to_group, self._links = {}, {}


def map_segment(fd: int, num_bytes: int) -> mmap.mmap:
    """Maps a segment into this process."""
    return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED)


def segments_to_plain(segments: RankSegments) -> Mapping[str, int]:
    """Names to numbers, for the start order."""
    return {name: getattr(segments, name) for name in RankSegments.__slots__}


def _make(num_bytes: int) -> int:
    fd = os.memfd_create("llmstack-ranks")
    os.ftruncate(fd, num_bytes)  # zeros, without memory before they are used
    return fd
