"""Exchange over torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store  # what torch.distributed offers without types

from llmstack_kernels.collective import CollectiveError
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_parallel.collectives.patience import LATE, LOST, Patience
from llmstack_parallel.collectives.rank_part import rank_part
from llmstack_parallel.topology import Topology

NCCL: Final = "nccl"
_LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"
_MAX_SENDS: Final = 4
"""Sends under way: the states of two steps."""

_LOOK_S: Final = 0.2
_GRACE_S: Final = 5.0


class TorchCollectives(ABC):
    """Sums and gathers of one stage's ranks.

    gloo and NCCL add the numbers of three or more ranks in an order that depends on their place in the tensor. A row
    has the same bits alone and in any batch only where `is_ordered`: then every rank gets all parts, and adds them
    itself.
    """

    def __init__(self, group: dist.ProcessGroup, patience: Patience, *, is_ordered: bool) -> None:
        self._group, self._patience = group, patience
        self._is_ordered = is_ordered and group.size() > 2  # two numbers have one sum

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place; if ordered, in float32, in the order of the ranks, rounded once.

        Raises:
            CollectiveError: A rank is missing.
        """
        if not self._is_ordered:
            self._finish(lambda: dist.all_reduce(tensor, group=self._group, async_op=True))
            return tensor
        first, *others = self._gather(tensor)
        total = first.float()
        for other in others:
            total += other
        return tensor.copy_(total)

    def all_gather(self, columns: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Columns of all ranks beside each other, padded on the way to equal widths.

        Raises:
            CollectiveError: A rank is missing.
        """
        own = columns.new_zeros((columns.shape[0], max(widths)))
        own[:, : columns.shape[1]] = columns
        pieces = self._gather(own)
        return torch.cat([piece[:, :width] for piece, width in zip(pieces, widths, strict=True)], dim=1)

    def _gather(self, own: torch.Tensor) -> Sequence[torch.Tensor]:
        flat = own.reshape(-1)
        parts = flat.new_empty(self._group.size() * flat.numel())
        self._finish(lambda: dist.all_gather_single(parts, flat, group=self._group, async_op=True))
        return parts.view(-1, *own.shape).unbind()

    def set_timeout(self, timeout_s: float) -> None:
        """Limits each later wait for another rank."""
        self._patience.timeout_s = timeout_s

    def check(self) -> None:
        """Raises CollectiveError once `abort` was called: later results are worthless."""
        self._patience.check()

    def abort(self) -> None:
        """Ends all waits; from any thread."""
        self._patience.abort()

    def leave(self) -> None:
        """Leaves torch.distributed; the other ranks may have ended."""
        leave()
        del self._group  # its threads end with it; the end of the process would be too late, and an abort

    @abstractmethod
    def _finish(self, start: Callable[[], dist.Work | None]) -> None:
        """Starts an exchange, and returns where later operations find its results."""


class GlooCollectives(TorchCollectives):
    """Sums and gathers on CPUs, which end with the ranks and keep the deadline of a step."""

    def __init__(self, group: dist.ProcessGroup, patience: Patience) -> None:
        super().__init__(group, patience, is_ordered=True)

    def _finish(self, start: Callable[[], dist.Work | None]) -> None:
        deadline = self._patience.deadline()
        work = start()
        while work is not None:
            try:
                work.wait(timedelta(seconds=_LOOK_S))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise CollectiveError(LOST) from error
                self._patience.check(deadline)


class NcclCollectives(TorchCollectives):
    """Sums and gathers on GPUs: they are queued as kernels are, so a step waits for them where it reads its results."""

    def set_timeout(self, timeout_s: float) -> None:
        """Limits each later wait for another rank. The watchdog of NCCL ends this process where one takes longer."""
        super().set_timeout(timeout_s)
        self._group.set_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """Ends all waits, also those of kernels that run; from any thread."""
        super().abort()
        _in_thread(self._group.abort)  # it may wait for the GPU

    def leave(self) -> None:
        """Leaves torch.distributed without the other ranks, for which NCCL would wait."""
        super().abort()

        def abort_and_leave() -> None:
            self._group.abort()
            leave()

        _in_thread(abort_and_leave).join(_GRACE_S)

    def _finish(self, start: Callable[[], dist.Work | None]) -> None:
        work = start()
        if work is not None:
            work.wait()  # the current stream waits, and not this thread


def _in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, name="leave-nccl", daemon=True)
    thread.start()
    return thread


def make_collectives(
    backend: str, group: dist.ProcessGroup | None, patience: Patience, *, is_deterministic: bool
) -> TorchCollectives:
    """The collectives of a stage's ranks. `is_deterministic`: Sums on GPUs are ordered, too."""
    if group is None:
        raise RuntimeError("torch.distributed has made no group")
    if backend == NCCL:
        return NcclCollectives(group, patience, is_ordered=is_deterministic)
    return GlooCollectives(group, patience)


def join(backend: str, store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Waits for all ranks, and connects them over the network interface of `set_interface`."""
    device = torch.device("cuda", torch.cuda.current_device()) if backend == NCCL else None  # connects it at once
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)


def set_interface(backend: str, interface: str) -> None:
    """Lets torch.distributed use one network interface alone."""
    if backend == NCCL:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # without the sign, also those whose names begin like it
        os.environ.setdefault("NCCL_IB_DISABLE", "1")  # InfiniBand would be another network
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def leave() -> None:
    """Leaves all groups of torch.distributed."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # other ranks have ended
            dist.destroy_process_group()


class TorchLinks:
    """The links of one rank to the same place of the neighbouring stages, over gloo."""

    def __init__(self, before: int, after: int, patience: Patience) -> None:
        """`before`, `after`: The ranks there, in the numbering of torch.distributed."""
        self._before, self._after, self._patience = before, after, patience
        self._sends: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sends copies to the next stage.

        Raises:
            CollectiveError: The next stage is lost.
        """
        for tensor in tensors:
            with self._limited() as timeout:
                if len(self._sends) >= _MAX_SENDS:
                    work, _ = self._sends.popleft()
                    _wait(work, timeout)
                copy = tensor.clone()
                self._sends.append((dist.isend(copy, self._after), copy))

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fills tensors from the stage before.

        Raises:
            CollectiveError: The stage before is lost.
        """
        for tensor in tensors:
            with self._limited() as timeout:
                _wait(dist.irecv(tensor, self._before), timeout)

    def receive_again(self) -> None:
        """Does nothing: an attempt to capture these calls ends before they are made."""

    def close(self) -> None:
        """Drops what is under way."""
        self._sends.clear()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[timedelta]:
        """The limit of a wait. gloo gives up a connection after that, so nothing can wait for shorter times."""
        deadline = self._patience.deadline()
        try:
            yield timedelta(seconds=self._patience.timeout_s)
        except RuntimeError as error:
            raise CollectiveError(LATE if monotonic() >= deadline else LOST) from error


def _wait(work: dist.Work | None, timeout: timedelta) -> None:
    if work is not None:
        work.wait(timeout)


class TorchExchange:
    """One rank's membership in torch.distributed, on one host."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        backend: str,
        directory: Path,
        timeout_s: float,
        *,
        is_deterministic: bool = False,
    ) -> None:
        """Waits for all ranks, which meet in a file of the private `directory`."""
        self._topology, self._rank = topology, rank
        self._patience = patience = Patience(timeout_s)
        if f"{backend.upper()}_SOCKET_IFNAME" not in os.environ:
            set_interface(backend, _LOOPBACK)
        join(backend, FileStore(str(directory / "ranks"), topology.num_ranks), rank, topology.num_ranks, timeout_s)
        stage, place = topology.stage(rank), topology.place(rank)
        self._links = TorchLinks(topology.rank(stage - 1, place), topology.rank(stage + 1, place), patience)
        self._collectives: TorchCollectives | None = None
        if topology.tensor_parallel_size > 1:
            group = _stage_group(topology, rank, timeout_s)
            self._collectives = make_collectives(backend, group, patience, is_deterministic=is_deterministic)

    def sharding(self, *, is_expert_parallel: bool) -> Sharding:
        """The rank's part of a model."""
        own = (self._topology, self._rank, self._collectives, self._links)
        return rank_part(*own, is_expert_parallel=is_expert_parallel)

    def set_timeout(self, timeout_s: float) -> None:
        """Limits each later wait for another rank."""
        self._patience.timeout_s = timeout_s
        if self._collectives is not None:
            self._collectives.set_timeout(timeout_s)

    def check(self) -> None:
        """Raises CollectiveError once `abort` was called."""
        self._patience.check()

    def abort(self) -> None:
        """Ends the waits of this rank; from any thread."""
        self._patience.abort()
        if self._collectives is not None:
            self._collectives.abort()

    def close(self) -> None:
        """Leaves the groups of torch.distributed."""
        self._links.close()
        if self._collectives is None:
            leave()
        else:
            self._collectives.leave()


def _stage_group(topology: Topology, rank: int, timeout_s: float) -> dist.ProcessGroup | None:
    if topology.pipeline_parallel_size == 1:
        return dist.group.WORLD
    own = None
    for stage in range(topology.pipeline_parallel_size):  # every rank makes every group, in the same order
        ranks = [topology.rank(stage, place) for place in range(topology.tensor_parallel_size)]
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        if stage == topology.stage(rank):
            own = group
    return own
