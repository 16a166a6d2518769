"""Processes of ranks on one machine: their start, and their end."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import dataclass

from llmstack_engine_client.processes.waiting_process import start_module
from llmstack_engine_core.openmp import SHORT_SPINS
from llmstack_parallel.rank_order import RankOrder, send_rank_order
from llmstack_parallel.topology import Topology

_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank.

    Attributes:
        lifeline: Our end of a socket pair; each side sees it close when the other side ends.
    """

    rank: int
    popen: subprocess.Popen[bytes]
    lifeline: socket.socket

    def describe_loss(self, topology: Topology) -> str:
        """The end of the process in words; waits for that a moment."""
        try:
            status = self.popen.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return f"{topology.describe(self.rank)} does not answer; its log says more"
        return f"{topology.describe(self.rank)} ended with status {status}; its log says more"


def start_rank(order: RankOrder, channel: socket.socket | None = None) -> RankProcess:
    """Starts a process and gives it its order.

    `channel`: Its end of the channel to the engine core's rank; None where it connects to that itself.

    Raises:
        OSError: There can be no further process.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            channels = [] if channel is None else [channel.fileno()]
            fds = [theirs.fileno(), *channels, *order.segments.descriptors]
            popen = start_module("llmstack_parallel.rank", fds, SHORT_SPINS)
    except OSError:
        ours.close()
        raise
    send_rank_order(ours, order)
    return RankProcess(order.rank, popen, ours)


def end_ranks(processes: list[RankProcess]) -> None:
    """Ends all ranks: closes their lifelines, and kills those that run on. The caller closes the descriptors."""
    for process in processes:
        process.lifeline.shutdown(socket.SHUT_RDWR)  # ends the rank, wherever it is
    for process in processes:
        try:
            process.popen.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()
