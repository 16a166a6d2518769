"""Start and end of the processes of the other ranks."""

from __future__ import annotations

import logging
import secrets
import select
import shutil
import socket
import threading

from llmstack_engine_core.ipc.sockets import make_private_directory
from llmstack_parallel.exchange import SHARED_MEMORY, make_exchange
from llmstack_parallel.protocols import Channel, Exchange
from llmstack_parallel.rank_order import RankOrder
from llmstack_parallel.rank_processes import RankProcess, end_ranks, start_rank
from llmstack_parallel.segments import Segments
from llmstack_parallel.socket_channel import SocketChannel
from llmstack_parallel.topology import Topology
from llmstack_types import EngineStartError, ModelRunnerConfig
from llmstack_types.log_lines import log_format_in_use

logger = logging.getLogger(__name__)

_MAX_EPOCH = 2**62


class ProcessPeers:
    """The other ranks as processes of this host. They end with this one.

    Attributes:
        epoch: Number of this start, in every frame.
        exchange: That of rank 0, in this process.
        channels: By rank.
    """

    def __init__(self, config: ModelRunnerConfig, backend: str, step_bytes: int) -> None:
        """Starts the processes and returns when they can be called.

        `step_bytes`: States of the largest step between two stages.

        Raises:
            EngineStartError: A process, a socket or shared memory could not be made.
        """
        self._topology = topology = Topology(config.tensor_parallel_size, config.pipeline_parallel_size)
        self.epoch = secrets.randbelow(_MAX_EPOCH)
        self.channels: dict[int, Channel] = {}
        self._directory = make_private_directory()
        self._processes: list[RankProcess] = []
        self._sockets: list[SocketChannel] = []
        self._lost: str | None = None
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        try:
            self.exchange: Exchange = self._start(config, topology, backend, step_bytes)
        except OSError as error:
            self.stop()
            raise EngineStartError(f"the other ranks cannot be started: {error}") from error
        except BaseException:
            self.stop()
            raise
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _start(self, config: ModelRunnerConfig, topology: Topology, backend: str, step_bytes: int) -> Exchange:
        segments = Segments(topology if backend == SHARED_MEMORY else Topology(), step_bytes)
        try:
            for rank in topology.peers:
                ours, theirs = socket.socketpair()
                channel = SocketChannel(ours)
                self._sockets.append(channel)
                self.channels[rank] = channel
                own = segments.of_rank(rank)
                level = logging.getLevelName(logger.getEffectiveLevel())
                order = RankOrder(
                    config, rank, self.epoch, "", backend, self._directory, own, level, log_format_in_use()
                )
                with theirs:
                    self._processes.append(start_rank(order, theirs))
            return make_exchange(backend, config, 0, segments.of_rank(0), self._directory)
        finally:
            segments.close()  # the processes have inherited them

    def lost(self) -> str | None:
        """Which rank has ended, and how; None while all run."""
        return self._lost

    def pids(self) -> dict[int, int]:
        """Process of each rank."""
        return {process.rank: process.popen.pid for process in self._processes}

    def stop(self, *, is_over: bool = True) -> None:
        """Ends all ranks, by force where they do not end by themselves. Idempotent."""
        self._stopping.set()
        processes, self._processes = self._processes, []
        end_ranks(processes)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for process in processes:
            process.lifeline.close()
        for channel in self._sockets:
            channel.close()
        self._sockets = []
        shutil.rmtree(self._directory, ignore_errors=True)

    def _watch(self) -> None:
        """Notices the end of a rank, and ends the waits for it."""
        poller = select.poll()
        fd_to_process = {process.lifeline.fileno(): process for process in self._processes}
        for fd in fd_to_process:
            poller.register(fd, select.POLLIN | select.POLLHUP)
        ready = poller.poll()
        if self._stopping.is_set():
            return
        process = fd_to_process[ready[0][0]]
        self._lost = process.describe_loss(self._topology)
        logger.error("%s", self._lost)
        self.exchange.abort()
