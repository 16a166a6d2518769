"""The process of one rank.

It is started as `python -m llmstack_parallel.rank FD`, with the start order on that descriptor. A second one is the
channel to the engine core's rank, where that is on this node.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

import zmq

from llmstack_kernels.collective import CollectiveError
from llmstack_model_runner.device.start_checks import resolve_device, use_own_gpu
from llmstack_parallel.channel import ZmqChannel
from llmstack_parallel.exchange import make_exchange
from llmstack_parallel.messages import MAX_FRAME_BYTES, MESSAGES, MeetMessage
from llmstack_parallel.protocols import Exchange
from llmstack_parallel.rank_loop import RankLoop
from llmstack_parallel.rank_order import RankOrder, receive_rank_order
from llmstack_parallel.socket_channel import SocketChannel
from llmstack_parallel.topology import Topology
from llmstack_types import EngineStartError, LLMStackError
from llmstack_types.log_lines import LogFormatter

logger = logging.getLogger("llmstack_parallel.rank")  # `__name__` is `__main__` here

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Computes one rank's part of every step; the exit status is 0 when it was asked to end."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine core ends its ranks
    if sys.platform == "linux":
        # A rank that is stopped goes on at the end of the engine core, and finds its lifeline closed. One that runs
        # ignores the signal, which also comes when only the thread that started it has ended.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    lifeline = socket.socket(fileno=int(arguments[0]))
    try:
        order = receive_rank_order(lifeline)
    except EngineStartError:  # the engine core has ended in the meantime
        return 1
    topology = Topology(order.config.tensor_parallel_size, order.config.pipeline_parallel_size)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(order.log_format, f"{topology.describe(order.rank)}, {os.getpid()}"))
    logging.basicConfig(level=order.log_level, handlers=[handler])
    shared = (lifeline, order.directory)
    threading.Thread(target=_end_with_engine_core, args=shared, name="lifeline", daemon=True).start()
    try:
        _serve(order, arguments)
    except (LLMStackError, CollectiveError) as error:  # another rank has ended
        logger.error("%s ends: %s", topology.describe(order.rank), error)
        logger.debug("where it happened", exc_info=True)
        return 1
    except Exception:  # the last place that can say so; the engine core sees the exit status
        logger.exception("%s failed", topology.describe(order.rank))
        return 1
    return 0


def _serve(order: RankOrder, arguments: list[str]) -> None:
    channel, exchange = _connect(order, arguments)
    for fd in order.segments.descriptors:
        os.close(fd)  # the memory stays mapped
    loop = RankLoop(order.config, channel, exchange, order.epoch)
    try:
        loop.run()
    finally:
        exchange.abort()
        loop.shutdown()
        channel.close()


def _connect(order: RankOrder, arguments: list[str]) -> tuple[ZmqChannel | SocketChannel, Exchange]:
    """The way to the engine core's rank, and to the others."""
    if order.config.placement is not None:
        return _join(order)
    _choose_gpu(order)
    channel = SocketChannel(socket.socket(fileno=int(arguments[1])))
    return channel, make_exchange(order.backend, order.config, order.rank, order.segments, order.directory)


def _join(order: RankOrder) -> tuple[ZmqChannel, Exchange]:
    """The channel and the exchange of a rank whose peers are on other nodes."""
    from llmstack_engine_client.hosts.network import Network, free_address
    from llmstack_parallel.hosts.meeting import Meeting, placement_of

    _choose_gpu(order)
    network = Network(placement_of(order.config).key_file, MAX_FRAME_BYTES)
    channel = ZmqChannel(network.connect(zmq.PAIR, order.address))
    meeting = Meeting(network, order.config, order.rank, order.epoch, free_address(order.address))
    channel.send(MESSAGES.encode(MeetMessage(meeting.link), order.epoch))
    meet = MESSAGES.decode(channel.receive() or b"", order.epoch)[1]
    if not isinstance(meet, MeetMessage):
        raise TypeError(f"the engine core's rank sent a {type(meet).__name__}")
    return channel, meeting.join(meet, order.segments)


def _choose_gpu(order: RankOrder) -> None:
    """Each rank of a machine has a GPU of its own; that of rank 0 is the first of its engine core."""
    if resolve_device(order.config.device).type == "cuda":
        use_own_gpu(order.config, order.rank % order.config.num_local_ranks)


def _end_with_engine_core(lifeline: socket.socket, directory: Path) -> None:
    with contextlib.suppress(OSError):
        while lifeline.recv(1):
            pass
    if directory.name:  # an engine core that was killed has left it
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)  # the main thread may wait for the others inside native code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
