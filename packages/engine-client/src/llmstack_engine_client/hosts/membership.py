"""The list of other machines, as the client of their engine cores sees it."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from llmstack_engine_client.hosts.members import have_common
from llmstack_engine_client.hosts.messages import Join

OnChange = Callable[[Mapping[int, Join]], None]
"""Receives all machines that there are. Each has the number of its connection: one that joins again has another."""


class Membership(ABC):
    """The source of the list of machines: the one that listens for them, or another process of this machine.

    Attributes:
        awaited: Engine cores of other machines without which there is no start.
        joins: The machines that there are.
    """

    awaited: Sequence[int] = ()

    def __init__(self) -> None:
        self.joins: Mapping[int, Join] = {}
        self._numbers = itertools.count()
        self._on_change: OnChange = lambda joins: None

    def serve(self, on_change: OnChange) -> None:
        """Calls `on_change` now and whenever a machine joins or ends."""
        self._on_change = on_change
        on_change(self.joins)

    def add(self, join: Join) -> None:
        """A machine has joined, also in place of itself, which has gone without a word."""
        others = {number: other for number, other in self.joins.items() if not have_common(other, join)}
        self.change(others | {next(self._numbers): join})

    def drop(self, join: Join) -> None:
        """A machine ends, and its engine cores with it."""
        self.change({number: other for number, other in self.joins.items() if other != join})

    def change(self, joins: Mapping[int, Join]) -> None:
        """There are other machines than before."""
        self.joins = joins
        self._on_change(joins)

    def find_problem(self) -> str:
        """Why the awaited engine cores will not come; empty where they may."""
        return ""

    def host_of(self, rank: int) -> str:
        """The name of the machine that an engine core runs on."""
        hosts = (join.host for join in self.joins.values() if rank in join.numbers)
        return next(hosts, f"the machine of engine core {rank}")

    @abstractmethod
    def refuse(self, rank: int, reason: str) -> None:
        """Sends the machine of an engine core away."""

    @abstractmethod
    async def close(self) -> None:
        """Stops following machines, since the endpoint ends. Idempotent."""
