"""Exchange over torch.distributed: NCCL between GPUs, gloo between CPUs.

The ranks meet in a file of a private directory. gloo connects over the loopback interface alone.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore  # what torch.distributed offers without types

from llmstack_model_runner.layers.sharding import Sharding
from llmstack_parallel.topology import Topology

_MAX_SENDS = 4
"""Sends under way: the states of two steps."""


class TorchCollectives:
    """Sums and gathers of one stage's ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, columns: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Columns of all ranks beside each other, padded on the way to equal widths."""
        num_rows, widest = columns.shape[0], max(widths)
        own = columns.new_zeros((num_rows, widest))
        own[:, : columns.shape[1]] = columns
        pieces = [torch.empty_like(own) for _ in widths]
        self._gather(pieces, own)
        return torch.cat([piece[:, :width] for piece, width in zip(pieces, widths, strict=True)], dim=1)

    def _gather(self, pieces: list[torch.Tensor], own: torch.Tensor) -> None:
        dist.all_gather(pieces, own, group=self._group)


class TorchLinks:
    """The links of one rank to the same place of the neighbouring stages."""

    def __init__(self, before: int, after: int) -> None:
        """`before`, `after`: The ranks there, in the numbering of torch.distributed."""
        self._before, self._after = before, after
        self._sends: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sends copies to the next stage."""
        for tensor in tensors:
            if len(self._sends) >= _MAX_SENDS:
                work, _ = self._sends.popleft()
                if work is not None:
                    work.wait()
            copy = tensor.clone()
            self._sends.append((dist.isend(copy, self._after), copy))

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fills tensors from the stage before."""
        for tensor in tensors:
            dist.recv(tensor, self._before)

    def receive_again(self) -> None:
        """Does nothing: an attempt to capture these calls ends before they are made."""


class TorchExchange:
    """One rank's membership in torch.distributed."""

    def __init__(self, topology: Topology, rank: int, backend: str, directory: Path, timeout_s: float) -> None:
        """Waits for all ranks."""
        if backend == "gloo":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._topology, self._rank = topology, rank
        store = FileStore(str(directory / "ranks"), topology.num_ranks)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=topology.num_ranks, timeout=timeout)
        places = range(topology.tensor_parallel_size)
        self._collectives: TorchCollectives | None = None
        for stage in range(topology.pipeline_parallel_size):  # every rank makes every group, in the same order
            group = dist.new_group([topology.rank(stage, place) for place in places], timeout=timeout)
            if stage == topology.stage(rank) and len(places) > 1:
                self._collectives = TorchCollectives(group)

    def sharding(self, *, is_expert_parallel: bool) -> Sharding:
        """The rank's part of a model."""
        topology, rank = self._topology, self._rank
        stage, place = topology.stage(rank), topology.place(rank)
        return Sharding(
            rank=place,
            size=topology.tensor_parallel_size,
            collectives=self._collectives,
            stage=stage,
            num_stages=topology.pipeline_parallel_size,
            links=TorchLinks(topology.rank(stage - 1, place), topology.rank(stage + 1, place)),
            is_expert_parallel=is_expert_parallel,
        )

    def set_timeout(self, timeout_s: float) -> None:
        """Nothing: the groups have the timeout that they were made with."""

    def check(self) -> None:
        """Nothing: torch.distributed raises errors itself."""

    def abort(self) -> None:
        """Nothing: connections to a rank that ended fail by themselves."""

    def close(self) -> None:
        """Leaves the groups of torch.distributed."""
        if dist.is_initialized():
            dist.destroy_process_group()
