"""The part of a model that one rank of several computes.

As with `packing`, the choice is a context around construction, so no model's constructor needs a parameter for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch


class Collectives(Protocol):
    """Exchange between the ranks that share every layer. All of them make the same calls in the same order.

    Results are bit-equal on all ranks. A failure, such as a peer that does not come, is an exception of the engine.
    """

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        ...

    def all_gather(self, columns: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Columns of all ranks beside each other: [n, widths[rank]] to [n, sum(widths)]."""
        ...


class StageLinks(Protocol):
    """Exchange with the stage before and the stage after; steps arrive in the order in which they are sent."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sends a step's states to the next stage; waits only while the link is full."""
        ...

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fills the tensors with the states of a step that the stage before has sent."""
        ...

    def receive_again(self) -> None:
        """The last step is computed again: the next `receive` gives the same states, if there were any."""
        ...


@dataclass(frozen=True)  # not with slots, which could not keep what is derived
class Sharding:
    """Place of one rank among those that compute a model together.

    Attributes:
        rank: Place among the ranks that share every layer (tensor parallel).
        size: Number of these ranks.
        collectives: Exchange between them; needed where `size` is more than 1.
        stage: Place among the stages, each of which has some of the layers (pipeline parallel).
        num_stages: Number of stages.
        links: Exchange with the neighbouring stages; needed where `num_stages` is more than 1.
        is_expert_parallel: Experts are whole and spread over the ranks; otherwise each rank has a part of every expert.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None
    stage: int = 0
    num_stages: int = 1
    links: StageLinks | None = None
    is_expert_parallel: bool = False

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether one rank computes everything."""
        return self.size == self.num_stages == 1

    @functools.cached_property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @functools.cached_property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    def share(self, total: int) -> range:
        """This rank's share of `total` items; shares differ by one item at most."""
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def widths(self, total: int) -> list[int]:
        """Sizes of all ranks' shares of `total` items."""
        return [total * (rank + 1) // self.size - total * rank // self.size for rank in range(self.size)]

    def layers(self, num_layers: int) -> range:
        """Numbers of this stage's layers.

        Raises:
            ValueError: There are fewer layers than stages.
        """
        if num_layers < self.num_stages:
            raise ValueError(
                f"pipeline_parallel_size is {self.num_stages}, but the model has only {num_layers} layers to split"
            )
        return range(num_layers * self.stage // self.num_stages, num_layers * (self.stage + 1) // self.num_stages)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[range, range]:
        """Query heads and KV heads of this rank. Where there are fewer KV heads than ranks, several ranks have one.

        Raises:
            ValueError: The heads cannot be shared out.
        """
        if num_heads % self.size:
            raise ValueError(
                f"tensor_parallel_size is {self.size}, and the model's {num_heads} attention heads "
                "are no multiple of it"
            )
        if num_kv_heads % self.size and self.size % num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size is {self.size}, which neither divides the model's {num_kv_heads} "
                "key-value heads nor is a multiple of them"
            )
        if num_kv_heads >= self.size:
            return self.share(num_heads), self.share(num_kv_heads)
        kv_head = self.rank * num_kv_heads // self.size
        return self.share(num_heads), range(kv_head, kv_head + 1)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, which may be computed in place."""
        return tensor if self.collectives is None else self.collectives.all_reduce(tensor)

    def all_gather(self, columns: torch.Tensor, total: int) -> torch.Tensor:
        """[n, total] of each rank's share of the columns."""
        return columns if self.collectives is None else self.collectives.all_gather(columns, self.widths(total))

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sends a step's states to the next stage."""
        if self.links is None:
            raise RuntimeError("this stage has no link to the next one")
        self.links.send(tensors)

    def receive(self, num_tensors: int, like: torch.Tensor, shape: tuple[int, int]) -> list[torch.Tensor]:
        """States of a step from the stage before; `like` has their type and device."""
        if self.links is None:
            raise RuntimeError("this stage has no link to the one before")
        tensors = [like.new_empty(shape) for _ in range(num_tensors)]
        self.links.receive(tensors)
        return tensors


def spread(items: range, size: int) -> range:
    """The numbers that a run of items takes, each of which has `size`."""
    return range(items.start * size, items.stop * size)


_sharding: ContextVar[Sharding] = ContextVar("_sharding", default=Sharding())  # noqa: B039 - it is frozen


@contextmanager
def sharded(chosen: Sharding) -> Iterator[None]:
    """Models that are constructed inside the block are one rank's part."""
    token = _sharding.set(chosen)
    try:
        yield
    finally:
        _sharding.reset(token)


def sharding() -> Sharding:
    """The rank whose part is constructed in this context."""
    return _sharding.get()
