"""The start order of a rank, over the socket that also tells of its end."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from llmstack_engine_core.ipc.lifeline import receive_order, send_order
from llmstack_parallel.segments import RankSegments, segments_to_plain
from llmstack_types import EngineStartError, ModelRunnerConfig
from llmstack_types.plain_data import from_plain, to_plain


@dataclass(frozen=True, slots=True)
class RankOrder:
    """One rank to start.

    Attributes:
        epoch: Number of this start of all ranks.
        address: Where the engine core's rank listens for this one; empty on its own node.
        backend: `shared_memory`, `gloo` or `nccl`.
        directory: Where ranks of torch.distributed meet.
        segments: Descriptors of shared memory, inherited under these numbers.
        log_level: The log level of the process.
        log_format: The format of its log.
    """

    config: ModelRunnerConfig
    rank: int
    epoch: int
    address: str
    backend: str
    directory: Path
    segments: RankSegments
    log_level: str
    log_format: str


def send_rank_order(lifeline: socket.socket, order: RankOrder) -> None:
    """Sends the order; a receiver that has died already is noticed by its answers."""
    send_order(lifeline, [
        to_plain(order.config), order.rank, order.epoch, order.address, order.backend, str(order.directory),
        dict(segments_to_plain(order.segments)), order.log_level, order.log_format,
    ])  # fmt: skip


def receive_rank_order(lifeline: socket.socket) -> RankOrder:
    """Waits for the order.

    Raises:
        EngineStartError: It is malformed, or the sender has ended.
    """
    match receive_order(lifeline):
        case [
            config,
            int(rank),
            int(epoch),
            str(address),
            str(backend),
            str(directory),
            segments,
            str(log_level),
            str(log_format),
        ]:
            return RankOrder(
                from_plain(ModelRunnerConfig, config), rank, epoch, address, backend, Path(directory),
                from_plain(RankSegments, segments), log_level, log_format,
            )  # fmt: skip
        case _:
            raise EngineStartError("the start order is malformed")
