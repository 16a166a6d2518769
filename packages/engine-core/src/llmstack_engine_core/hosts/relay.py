"""Machines that have joined, relayed by one process to others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from llmstack_engine_core.hosts.messages import MAX_REASON_LENGTH, Join, pack, unpack
from llmstack_engine_core.hosts.rendezvous import Rendezvous
from llmstack_engine_core.ipc.fields import CodecError

Message = dict[str, Any]
"""A JSON object."""


class MembershipFeed:
    """The side of the process that listens for machines: what it tells the others, and what they ask of it."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._number_to_join: dict[int, Join] = {}
        self._numbers = itertools.count()
        self._publish: Callable[[Message], None] | None = None

    @property
    def state(self) -> list[Message]:
        """Messages from which a process that starts learns which machines there are."""
        return [_joined(number, join) for number, join in self._number_to_join.items()]

    def serve(self, publish: Callable[[Message], None]) -> None:
        """Answers the machines from now on; `publish` sends a message to each of the other processes."""
        self._publish = publish
        self._rendezvous.serve(self._on_join, self._on_leave)

    def refuse(self, message: Message) -> None:
        """Sends a machine away that another process cannot use; an earlier connection of it is none of today."""
        number, rank = message["refuse"], message["rank"]
        if number in self._number_to_join:
            self._drop(number)
            self._rendezvous.refuse(rank, str(message["reason"]))

    async def close(self) -> None:
        """Tells the machines that the endpoint ends. Idempotent."""
        await self._rendezvous.close()

    def _on_join(self, join: Join) -> None:
        for number, other in list(self._number_to_join.items()):
            if set(other.ranks) & set(join.ranks):  # it has gone without a word
                del self._number_to_join[number]
        number = next(self._numbers)
        self._number_to_join[number] = join
        self._tell(_joined(number, join))

    def _on_leave(self, join: Join) -> None:
        for number, other in list(self._number_to_join.items()):
            if other == join:
                self._drop(number)

    def _drop(self, number: int) -> None:
        del self._number_to_join[number]
        self._tell({"member": number, "leaves": True})

    def _tell(self, message: Message) -> None:
        if self._publish is not None:
            self._publish(message)


class RelayedMembers:
    """The side of another process: stands in for a `Rendezvous`."""

    awaited: Sequence[int] = ()

    def __init__(self, send: Callable[[Message], None]) -> None:
        """`send`: Sends a message to the process that listens for machines."""
        self._send = send
        self._number_to_join: dict[int, Join] = {}
        self._on_join: Callable[[Join], None] | None = None
        self._on_leave: Callable[[Join], None] | None = None

    def find_problem(self) -> str:
        """There is none: an endpoint can begin without other machines."""
        return ""

    def take(self, message: Message) -> None:
        """Takes a message of the process that listens.

        Raises:
            CodecError: It is none.
        """
        match message:
            case {"member": int(number), "leaves": True}:
                join = self._number_to_join.pop(number, None)
                if join is not None and self._on_leave is not None:
                    self._on_leave(join)
            case {"member": int(number), "join": str(frame)}:
                joined = unpack(bytes.fromhex(frame))
                if not isinstance(joined, Join):
                    raise CodecError("not the join of a machine")
                self._add(number, joined)
            case _:
                raise CodecError("no message about a machine")

    def _add(self, number: int, join: Join) -> None:
        for other_number, other in list(self._number_to_join.items()):
            if set(other.ranks) & set(join.ranks):
                del self._number_to_join[other_number]
        self._number_to_join[number] = join
        if self._on_join is not None:
            self._on_join(join)

    def serve(self, on_join: Callable[[Join], None], on_leave: Callable[[Join], None]) -> None:
        """Calls `on_join` for machines that are there and that come, `on_leave` for those that end. Idempotent."""
        if self._on_join is not None:
            return
        self._on_join, self._on_leave = on_join, on_leave
        for join in list(self._number_to_join.values()):
            on_join(join)

    def refuse(self, rank: int, reason: str) -> None:
        """Asks that the machine of an engine core be sent away."""
        for number, join in list(self._number_to_join.items()):
            if rank in join.ranks:
                self._send({"refuse": number, "rank": rank, "reason": reason[:MAX_REASON_LENGTH]})

    def host_of(self, rank: int) -> str:
        """The machine of an engine core."""
        hosts = (join.host for join in self._number_to_join.values() if rank in join.ranks)
        return next(hosts, f"the machine of engine core {rank}")

    async def close(self) -> None:
        """Is notified of no machine any more; the process that listens tells them the end. Idempotent."""
        self._on_join = self._on_leave = None
        self._number_to_join.clear()


def _joined(number: int, join: Join) -> Message:
    return {"member": number, "join": pack(join).hex()}
