"""Machines that have joined, relayed by one process to others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from llmstack_engine_client.hosts.membership import Membership
from llmstack_engine_client.hosts.messages import MAX_TEXT_LENGTH, MESSAGES, Join
from llmstack_engine_core.messages.kinds import CodecError

Message = dict[str, Any]
"""A JSON object."""


class MembershipFeed:
    """The side of the process that listens for machines: it publishes their list, and answers questions."""

    def __init__(self, members: Membership) -> None:
        self._members = members

    @property
    def state(self) -> Message:
        """The message from which a process learns which machines there are."""
        return {"members": [[number, MESSAGES.encode(join).hex()] for number, join in self._members.joins.items()]}

    def serve(self, publish: Callable[[Message], None]) -> None:
        """Answers the machines from now on; `publish` sends a message to each of the other processes."""
        self._members.serve(lambda joins: publish(self.state))

    def refuse(self, message: Message) -> None:
        """Sends a machine away that another process cannot use; an earlier connection of it is none of today."""
        if message["refuse"] in self._members.joins:
            self._members.refuse(message["rank"], str(message["reason"]))

    async def close(self) -> None:
        """Tells the machines that the endpoint ends. Idempotent."""
        await self._members.close()


class RelayedMembers(Membership):
    """The side of another process: stands in for the `Membership` of the process that listens."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        """`send`: Sends a message to the process that listens for machines."""
        super().__init__()
        self._send = send

    def take(self, message: Message) -> None:
        """Takes a message of the process that listens.

        Raises:
            CodecError: It is none.
        """
        match message:
            case {"members": [*members]}:
                self.change(dict(map(_member, members)))
            case _:
                raise CodecError("no message about machines")

    def refuse(self, rank: int, reason: str) -> None:
        """Asks that the machine of an engine core be sent away."""
        for number, join in self.joins.items():
            if rank in join.numbers:
                self._send({"refuse": number, "rank": rank, "reason": reason[:MAX_TEXT_LENGTH]})

    async def close(self) -> None:
        """Is notified of no machine any more; the process that listens tells them the end. Idempotent."""
        self._on_change = lambda joins: None
        self.joins = {}


def _member(entry: object) -> tuple[int, Join]:
    match entry:
        case [int(number), str(frame)]:
            with contextlib.suppress(ValueError):  # not hexadecimal, or no message
                if isinstance(join := MESSAGES.decode(bytes.fromhex(frame))[1], Join):
                    return number, join
    raise CodecError("no machine that has joined")
