"""The ranks of one node."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from llmstack_parallel.hosts.meeting import shares_memory
from llmstack_parallel.rank_order import RankOrder
from llmstack_parallel.rank_processes import RankProcess, end_ranks, start_rank
from llmstack_parallel.segments import RankSegments, Segments
from llmstack_parallel.topology import Topology
from llmstack_types import EngineStartError, ModelRunnerConfig
from llmstack_types.log_lines import log_format_in_use

logger = logging.getLogger(__name__)

_NO_SEGMENTS: Final = RankSegments(-1, -1, -1, 0)


class LocalRanks:
    """Processes of a node's ranks, and the memory that those of one stage share.

    Attributes:
        segments: The shared memory of rank 0, which is no process of its own; to be mapped before `close_segments`.
    """

    def __init__(self, config: ModelRunnerConfig, epoch: int, orders: Sequence[tuple[int, str]]) -> None:
        """Starts a process for each order, which is a rank and where node 0 listens for it.

        Raises:
            EngineStartError: A process or shared memory could not be made.
        """
        self._topology = Topology(config.tensor_parallel_size, config.pipeline_parallel_size)
        self._processes: list[RankProcess] = []
        self._segments: dict[int, Segments] = {}  # by stage
        # Every rank would read all of the weights once more.
        config = replace(config, digest_weight_content=False)
        self._has_memory = shares_memory(config)
        level = logging.getLevelName(logger.getEffectiveLevel())
        try:
            for rank, address in orders:
                own = self.segments(rank)
                order = RankOrder(config, rank, epoch, address, "", Path(), own, level, log_format_in_use())
                self._processes.append(start_rank(order))
        except OSError as error:
            self.stop()
            raise EngineStartError(f"the ranks of this node cannot be started: {error}") from error

    def segments(self, rank: int) -> RankSegments:
        """The shared memory that a rank maps."""
        if not self._has_memory:
            return _NO_SEGMENTS
        stage = self._topology.stage(rank)
        if stage not in self._segments:
            self._segments[stage] = Segments(Topology(self._topology.tensor_parallel_size), 0)
        return self._segments[stage].of_rank(self._topology.place(rank))

    def close_segments(self) -> None:
        """Closes the descriptors; what is mapped stays."""
        for segments in self._segments.values():
            segments.close()
        self._segments = {}

    def pids(self) -> dict[int, int]:
        """The process id of each rank."""
        return {process.rank: process.popen.pid for process in self._processes}

    @property
    def fds(self) -> list[int]:
        """They become readable when a rank ends."""
        return [process.lifeline.fileno() for process in self._processes]

    def describe_loss(self, fd: int) -> str:
        """Which rank has ended, and how."""
        process = next(process for process in self._processes if process.lifeline.fileno() == fd)
        return process.describe_loss(self._topology)

    def stop(self) -> None:
        """Ends all of them. Idempotent."""
        self.close_segments()
        processes, self._processes = self._processes, []
        end_ranks(processes)
        for process in processes:
            process.lifeline.close()
