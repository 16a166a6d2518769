"""Exchange between ranks of several nodes.

Ranks that share every layer use shared memory where one node has all of them, else gloo or NCCL. States go from stage
to stage over encrypted channels.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import zmq

from llmstack_kernels.collective import CollectiveError, SharedGroup
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_parallel.collectives.patience import Patience
from llmstack_parallel.collectives.rank_part import rank_part
from llmstack_parallel.collectives.torch_distributed import TorchCollectives
from llmstack_parallel.topology import Topology

PIECE_BYTES: Final = 16 << 20
MAX_PIECES: Final = 16
"""Pieces that a link holds on each side."""

_EPOCH: Final = struct.Struct("!Q")
_LOOK_S: Final = 0.2


class ChannelLinks:
    """The links of one rank to the same place of the neighbouring stages, as pairs of sockets."""

    def __init__(
        self,
        before: zmq.Socket[bytes] | None,
        after: zmq.Socket[bytes] | None,
        epoch: int,
        patience: Patience,
    ) -> None:
        self._before, self._after = before, after
        self._head = _EPOCH.pack(epoch)
        self._patience = patience

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sends copies to the next stage; waits while `MAX_PIECES` are unread.

        Raises:
            CollectiveError: The next stage is lost.
        """
        if self._after is None:
            raise RuntimeError("the last stage sends nothing")
        for tensor in tensors:
            copy = tensor.clone()  # also ends an attempt to capture the step, which could not repeat this
            num_bytes = copy.numel() * copy.element_size()
            for start in range(0, num_bytes, PIECE_BYTES):
                piece = ctypes.string_at(copy.data_ptr() + start, min(PIECE_BYTES, num_bytes - start))
                self._wait(self._after, int(zmq.POLLOUT))
                self._after.send(self._head + piece, zmq.NOBLOCK)

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fills contiguous tensors from the stage before.

        Raises:
            CollectiveError: The stage before is lost, or sent something else.
        """
        if self._before is None:
            raise RuntimeError("the first stage receives nothing")
        for tensor in tensors:
            tensor.zero_()  # ends an attempt to capture the step before a message is taken
            num_bytes = tensor.numel() * tensor.element_size()
            for start in range(0, num_bytes, PIECE_BYTES):
                self._wait(self._before, int(zmq.POLLIN))
                frame = self._before.recv(zmq.NOBLOCK)
                size = min(PIECE_BYTES, num_bytes - start)
                if len(frame) != len(self._head) + size or not frame.startswith(self._head):
                    raise CollectiveError("the stage before has sent states of another step")
                ctypes.memmove(tensor.data_ptr() + start, frame[len(self._head) :], size)

    def receive_again(self) -> None:
        """Does nothing: an attempt to capture these calls ends before they are made."""

    def _wait(self, socket: zmq.Socket[bytes], event: int) -> None:
        deadline = self._patience.deadline()
        while not socket.poll(int(_LOOK_S * 1000), event):
            self._patience.check(deadline)

    def close(self) -> None:
        """Closes the sockets; what was sent last has a moment to arrive."""
        for socket in (self._before, self._after):
            if socket is not None:
                socket.close()


@dataclass(frozen=True, slots=True)
class NodesExchange:
    """One rank's part in exchanges over several nodes."""

    topology: Topology
    rank: int
    collectives: SharedGroup | TorchCollectives | None
    links: ChannelLinks
    patience: Patience

    def sharding(self, *, is_expert_parallel: bool) -> Sharding:
        """The rank's part of a model."""
        own = (self.topology, self.rank, self.collectives, self.links)
        return rank_part(*own, is_expert_parallel=is_expert_parallel)

    def set_timeout(self, timeout_s: float) -> None:
        """Limits each later wait for another rank."""
        self.patience.timeout_s = timeout_s
        if self.collectives is not None:
            self.collectives.set_timeout(timeout_s)

    def check(self) -> None:
        """Raises CollectiveError if an exchange has failed, also one that was replayed."""
        if self.collectives is not None:
            self.collectives.check()

    def abort(self) -> None:
        """Ends the waits of this rank, and of those with which it shares memory; from any thread."""
        self.patience.abort()
        if self.collectives is not None:
            self.collectives.abort()

    def close(self) -> None:
        """Closes the links, and leaves the groups of torch.distributed."""
        self.links.close()
        if isinstance(self.collectives, TorchCollectives):
            self.collectives.leave()
