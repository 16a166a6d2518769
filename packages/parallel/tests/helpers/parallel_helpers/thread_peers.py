"""Ranks as threads of the test's process, which exchange data as ranks of a host do."""

from __future__ import annotations

import queue
import threading

from llmstack_parallel.collectives.shared_memory import SharedMemoryExchange
from llmstack_parallel.peers import states_bytes
from llmstack_parallel.protocols import Channel
from llmstack_parallel.rank_loop import RankLoop
from llmstack_parallel.segments import Segments
from llmstack_parallel.topology import Topology
from llmstack_types import ModelRunnerConfig


class QueueChannel:
    """One end of two queues of frames."""

    def __init__(self, incoming: queue.SimpleQueue[bytes], outgoing: queue.SimpleQueue[bytes]) -> None:
        self._incoming, self._outgoing = incoming, outgoing

    def send(self, frame: bytes) -> None:
        self._outgoing.put(frame)

    def receive(self, timeout_ms: int | None = None) -> bytes | None:
        try:
            return self._incoming.get(timeout=None if timeout_ms is None else timeout_ms / 1000)
        except queue.Empty:
            return None


class ThreadPeers:
    """All ranks but rank 0, each in a thread. A failure of one is what `lost` says, as with a process."""

    def __init__(self, config: ModelRunnerConfig) -> None:
        topology = Topology(config.tensor_parallel_size, config.pipeline_parallel_size)
        segments = Segments(topology, states_bytes(config))
        self.epoch = 7
        self.exchange = SharedMemoryExchange(topology, 0, segments.of_rank(0))
        self.channels: dict[int, Channel] = {}
        self.errors: dict[int, BaseException] = {}
        self._threads = []
        for rank in topology.peers:
            down: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            up: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            self.channels[rank] = QueueChannel(up, down)
            exchange = SharedMemoryExchange(topology, rank, segments.of_rank(rank))
            loop = RankLoop(config, QueueChannel(down, up), exchange, self.epoch)
            self._threads.append(threading.Thread(target=self._run, args=(rank, loop, exchange), daemon=True))
        segments.close()
        for thread in self._threads:
            thread.start()

    def _run(self, rank: int, loop: RankLoop, exchange: SharedMemoryExchange) -> None:
        try:
            loop.run()
        except Exception as error:  # noqa: BLE001 - whatever ends a rank, as with a process
            self.errors[rank] = error
            exchange.abort()
        loop.shutdown()

    def lost(self) -> str | None:
        return next((f"rank {rank}: {error!r}" for rank, error in self.errors.items()), None)

    def stop(self, *, is_over: bool = True) -> None:
        from llmstack_parallel.messages import MESSAGES, Call, CallMessage

        for channel in self.channels.values():
            channel.send(MESSAGES.encode(CallMessage(Call.END), self.epoch))
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)
