"""Ranks of one host: a step's message, and a sum over shared memory.

python packages/parallel/benchmarks/bench_ranks.py
"""

from __future__ import annotations

import mmap
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from llmstack_kernels.collective import SharedGroup
from llmstack_parallel.messages import MESSAGES, Answer, StepMessage
from llmstack_parallel.socket_channel import SocketChannel
from llmstack_types import ScheduledRequest, SchedulerOutput

NUM_ROWS, WIDTH = 32, 4096
NUM_REPEATS = 400


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process; its id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def measure_control() -> float:
    """Microseconds of one step's message of 32 rows to another process, and of an answer: the median."""
    rows = [ScheduledRequest(f"request-{index:08}", 100 + index, 1, []) for index in range(NUM_ROWS)]
    step = SchedulerOutput(1, scheduled_requests=rows, total_num_scheduled_tokens=NUM_ROWS)
    ours, theirs = socket.socketpair()

    def answer() -> None:
        channel = SocketChannel(theirs)
        for _ in range(NUM_REPEATS):
            MESSAGES.decode(channel.receive() or b"", 1)
            channel.send(MESSAGES.encode(Answer(), 1))

    pid = in_child(answer)
    channel = SocketChannel(ours)
    times = []
    for number in range(NUM_REPEATS):
        start = time.perf_counter()
        channel.send(MESSAGES.encode(StepMessage(number, step), 1))
        MESSAGES.decode(channel.receive() or b"", 1)
        times.append(time.perf_counter() - start)
    os.waitpid(pid, 0)
    return statistics.median(times) * 1e6


def measure_sum() -> tuple[float, float]:
    """Microseconds of a sum of 32 x 4096 numbers between two processes: ours, and a loop that copies and spins."""
    group_memory = mmap.mmap(-1, SharedGroup.num_bytes(2))
    num_bytes = NUM_ROWS * WIDTH * 4
    loop_memory = mmap.mmap(-1, 128 + 4 * num_bytes)
    flags = np.frombuffer(loop_memory, np.int64, 16)
    slots = np.frombuffer(loop_memory, np.float32, offset=128).reshape(2, 2, NUM_ROWS * WIDTH)  # by parity and rank

    def ours(rank: int) -> list[float]:
        group, tensor = SharedGroup(group_memory, rank, 2), torch.zeros(NUM_ROWS, WIDTH)
        return timed(lambda _: group.all_reduce(tensor))

    def spinning(rank: int) -> list[float]:
        tensor = np.zeros(NUM_ROWS * WIDTH, np.float32)

        def exchange(number: int) -> None:
            parity = number & 1
            np.copyto(slots[parity, rank], tensor)
            flags[8 * rank] = number + 1
            while flags[8 * (1 - rank)] < number + 1:
                pass
            np.add(slots[parity, 0], slots[parity, 1], out=tensor)

        return timed(exchange)

    found = []
    for work in (ours, spinning):
        pid = in_child(lambda work=work: work(1))  # type: ignore[misc]
        found.append(statistics.median(work(0)) * 1e6)
        os.waitpid(pid, 0)
    return found[0], found[1]


def timed(call: Callable[[int], Any]) -> list[float]:
    times = []
    for number in range(NUM_REPEATS):
        start = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    torch.set_num_threads(1)
    print(f"control of a step of {NUM_ROWS} rows, there and back: {measure_control():.0f} us")
    ours, spinning = measure_sum()
    print(f"sum of {NUM_ROWS} x {WIDTH} float32 of two processes: {ours:.0f} us, spinning copy {spinning:.0f} us")
    print(f"ratio: {ours / spinning:.2f}")


if __name__ == "__main__":
    main()
