"""Machines that have joined, relayed by one process to others."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from llmstack_engine_client.hosts.members import have_common
from llmstack_engine_client.hosts.membership import Membership
from llmstack_engine_client.hosts.messages import MAX_TEXT_LENGTH, MESSAGES, Join
from llmstack_engine_core.messages.kinds import CodecError

Message = dict[str, Any]
"""A JSON object."""


class MembershipFeed:
    """The side of the process that listens for machines: what it tells the others, and what they ask of it."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._number_to_join: dict[int, Join] = {}
        self._numbers = itertools.count()
        self._publish: Callable[[Message], None] | None = None

    @property
    def state(self) -> Message:
        """The message from which a process learns which machines there are."""
        return {"members": [[number, MESSAGES.encode(join).hex()] for number, join in self._number_to_join.items()]}

    def serve(self, publish: Callable[[Message], None]) -> None:
        """Answers the machines from now on; `publish` sends a message to each of the other processes."""
        self._publish = publish
        self._members.serve(self._on_join, self._on_leave)

    def refuse(self, message: Message) -> None:
        """Sends a machine away that another process cannot use; an earlier connection of it is none of today."""
        number, rank = message["refuse"], message["rank"]
        if self._number_to_join.pop(number, None) is not None:
            self._tell()
            self._members.refuse(rank, str(message["reason"]))

    async def close(self) -> None:
        """Tells the machines that the endpoint ends. Idempotent."""
        await self._members.close()

    def _on_join(self, join: Join) -> None:
        for number, other in list(self._number_to_join.items()):
            if have_common(other, join):  # it has gone without a word
                del self._number_to_join[number]
        self._number_to_join[next(self._numbers)] = join
        self._tell()

    def _on_leave(self, join: Join) -> None:
        self._number_to_join = {number: other for number, other in self._number_to_join.items() if other != join}
        self._tell()

    def _tell(self) -> None:
        if self._publish is not None:
            self._publish(self.state)


class RelayedMembers(Membership):
    """The side of another process: stands in for the `Membership` of the process that listens."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        """`send`: Sends a message to the process that listens for machines."""
        super().__init__()
        self._send = send
        self._number_to_join: dict[int, Join] = {}

    def take(self, message: Message) -> None:
        """Takes a message of the process that listens.

        Raises:
            CodecError: It is none.
        """
        match message:
            case {"members": [*members]}:
                number_to_join = dict(map(_member, members))
            case _:
                raise CodecError("no message about machines")
        before, self._number_to_join = self._number_to_join, number_to_join
        for number, join in before.items():
            # One that joins again in place of itself does not leave: its engine cores may have gone on.
            if number not in number_to_join and not any(have_common(join, other) for other in number_to_join.values()):
                self.note_leave(join)
        for number, join in number_to_join.items():
            if number not in before:
                self.note_join(join)

    def serve(self, on_join: Callable[[Join], None], on_leave: Callable[[Join], None]) -> None:
        """Calls `on_join` for machines that are there and that come, `on_leave` for those that end. Idempotent."""
        if self._on_join is None:
            super().serve(on_join, on_leave)
            for join in list(self._number_to_join.values()):
                on_join(join)

    def refuse(self, rank: int, reason: str) -> None:
        """Asks that the machine of an engine core be sent away."""
        for number, join in list(self._number_to_join.items()):
            if rank in join.numbers:
                self._send({"refuse": number, "rank": rank, "reason": reason[:MAX_TEXT_LENGTH]})

    async def close(self) -> None:
        """Is notified of no machine any more; the process that listens tells them the end. Idempotent."""
        self._on_join = self._on_leave = None
        self._number_to_join = {}

    def _joins(self) -> Iterable[Join]:
        return self._number_to_join.values()


def _member(entry: object) -> tuple[int, Join]:
    match entry:
        case [int(number), str(frame)]:
            with contextlib.suppress(ValueError):  # not hexadecimal, or no message
                if isinstance(join := MESSAGES.decode(bytes.fromhex(frame))[1], Join):
                    return number, join
    raise CodecError("no machine that has joined")
