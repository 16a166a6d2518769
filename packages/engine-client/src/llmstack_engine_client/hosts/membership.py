"""The list of other machines, as the client of their engine cores sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from llmstack_engine_client.hosts.messages import Join


class Membership(ABC):
    """The source of the list of machines: the one that listens for them, or another process of this machine.

    Attributes:
        awaited: Engine cores of other machines without which there is no start.
    """

    awaited: Sequence[int] = ()

    def __init__(self) -> None:
        self._on_join: Callable[[Join], None] | None = None
        self._on_leave: Callable[[Join], None] | None = None

    def serve(self, on_join: Callable[[Join], None], on_leave: Callable[[Join], None]) -> None:
        """Calls `on_join` for a machine that is welcome, `on_leave` for one that ends."""
        self._on_join, self._on_leave = on_join, on_leave

    def note_join(self, join: Join) -> None:
        """A machine has joined, and its engine cores can be used."""
        if self._on_join is not None:
            self._on_join(join)

    def note_leave(self, join: Join) -> None:
        """A machine ends, and its engine cores with it."""
        if self._on_leave is not None:
            self._on_leave(join)

    def find_problem(self) -> str:
        """Why the awaited engine cores will not come; empty where they may."""
        return ""

    def host_of(self, rank: int) -> str:
        """The name of the machine that an engine core runs on."""
        hosts = (join.host for join in self._joins() if rank in join.numbers)
        return next(hosts, f"the machine of engine core {rank}")

    @abstractmethod
    def refuse(self, rank: int, reason: str) -> None:
        """Sends the machine of an engine core away."""

    @abstractmethod
    async def close(self) -> None:
        """Stops following machines, since the endpoint ends. Idempotent."""

    @abstractmethod
    def _joins(self) -> Iterable[Join]:
        """The machines that there are."""
