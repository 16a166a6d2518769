"""The process of a node but node 0: it joins that one and starts its ranks.

It joins again where the ranks have ended and others are about to start, and ends with node 0.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from llmstack_engine_client.hosts.joining import Joining
from llmstack_engine_client.hosts.messages import Failed, Join, Start, own_name
from llmstack_engine_core.ipc.addresses import interface_address
from llmstack_parallel.hosts.facts import facts_of
from llmstack_parallel.hosts.local_ranks import LocalRanks
from llmstack_parallel.hosts.meeting import first_machine, is_group_local, placement_of
from llmstack_types import EngineStartError, ModelRunnerConfig

logger = logging.getLogger(__name__)

REJOIN_S: Final = 60.0
"""How long node 0 may be away while it replaces an engine core that has crashed."""


class NodeAgent:
    """Hosts the ranks of one node until node 0 ends.

    Attributes:
        ranks: The running ranks; None while node 0 waits for nodes, or is away.
    """

    def __init__(self, config: ModelRunnerConfig, patience_s: float) -> None:
        """`patience_s`: How long node 0 may take to be there at the start.

        Raises:
            EngineStartError: The keys, the model's files or the network interface cannot be used.
        """
        self._config, placement = config, placement_of(config)
        if config.tensor_parallel_size > 1 and not is_group_local(config):
            interface_address(placement.interface)  # it is there
        self._join = Join(own_name(), placement.node, facts_of(config))
        self._joining = Joining(first_machine(config), patience_s, REJOIN_S, self._start, self._end_ranks)
        self.ranks: LocalRanks | None = None

    async def run(self) -> None:
        """Returns when node 0 has ended on purpose.

        Raises:
            EngineStartError: Node 0 refuses this one, or has been away for too long, or ranks cannot be started.
        """
        try:
            await self._joining.run(self._join)
        finally:
            self._end_ranks()

    def _start(self, start: Start) -> None:
        self._end_ranks()
        if not start.generation.isdecimal():
            raise EngineStartError("node 0 starts ranks without a number of the start")
        ranks = ", ".join(str(rank) for rank, _ in start.ranks)
        logger.info("starting ranks %s of %d", ranks, self._config.num_ranks)
        self.ranks = LocalRanks(self._config, int(start.generation), start.ranks)
        self.ranks.close_segments()
        for fd in self.ranks.fds:
            asyncio.get_running_loop().add_reader(fd, self._lose, fd, self.ranks, start.generation)

    def _lose(self, fd: int, ranks: LocalRanks, generation: str) -> None:
        how = ranks.describe_loss(fd)
        logger.error("%s", how)
        self._joining.tell(Failed(generation, how))
        self._end_ranks()

    def _end_ranks(self) -> None:
        """Ends the ranks of this node; others start when node 0 says so."""
        ranks, self.ranks = self.ranks, None
        if ranks is not None:
            for fd in ranks.fds:
                asyncio.get_running_loop().remove_reader(fd)
            ranks.stop()
