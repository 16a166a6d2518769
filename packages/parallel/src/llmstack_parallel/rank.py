"""The process of one rank.

The engine core's rank starts it as `python -m llmstack_parallel.rank FD`, with the start order on that descriptor.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading

import torch
import zmq

from llmstack_parallel.channel import ZmqChannel
from llmstack_parallel.exchange import make_exchange
from llmstack_parallel.rank_loop import RankLoop
from llmstack_parallel.rank_order import RankOrder, receive_rank_order
from llmstack_parallel.topology import Topology
from llmstack_types import EngineStartError
from llmstack_types.log_lines import LogFormatter

logger = logging.getLogger("llmstack_parallel.rank")  # `__name__` is `__main__` here


def main(arguments: list[str]) -> int:
    """Computes one rank's part of every step; the exit status is 0 when it was asked to end."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine core ends its ranks
    lifeline = socket.socket(fileno=int(arguments[0]))
    try:
        order = receive_rank_order(lifeline)
    except EngineStartError:  # the engine core has ended in the meantime
        return 1
    topology = Topology(order.config.tensor_parallel_size, order.config.pipeline_parallel_size)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(order.log_format, f"{topology.describe(order.rank)}, {os.getpid()}"))
    logging.basicConfig(level=order.log_level, handlers=[handler])
    threading.Thread(target=_end_with_engine_core, args=(lifeline,), name="lifeline", daemon=True).start()
    try:
        _serve(order, topology)
    except Exception:  # the last place that can say so; the engine core sees the exit status
        logger.exception("%s failed", topology.describe(order.rank))
        return 1
    return 0


def _serve(order: RankOrder, topology: Topology) -> None:
    if order.backend == "nccl":
        torch.cuda.set_device(order.rank)
    channel = ZmqChannel(zmq.Context.instance(), order.address, binds=True)
    exchange = make_exchange(order.backend, topology, order.rank, order.segments, order.directory)
    for fd in order.segments.descriptors:
        os.close(fd)  # the memory stays mapped
    loop = RankLoop(order.config, channel, exchange, order.epoch)
    try:
        loop.run()
    finally:
        exchange.abort()
        loop.shutdown()
        channel.close()


def _end_with_engine_core(lifeline: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while lifeline.recv(1):
            pass
    os._exit(1)  # the main thread may wait for the others inside native code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
