"""Values of `request_id` in running requests, once at a time for each API key."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

from llmstack_server.state.peers import Peers
from llmstack_types import InvalidRequestError

TOPIC = "request_id"
MAX_REMEMBERED = 65_536


class RequestIds:
    """The ids that running requests have claimed in this process.

    With several processes one of them, which follows from the id, remembers the process that claimed the id last. It
    asks that process before it gives the id to another one, so no message follows the end of a request or of a
    process. Where the remembering process gives no answer, an id is only compared with those of this process.
    """

    def __init__(self) -> None:
        self._in_use: set[str] = set()
        self._peers: Peers | None = None
        self._key_to_index: OrderedDict[str, int] = OrderedDict()
        self._asked: set[str] = set()

    def share(self, peers: Peers | None) -> None:
        """Shares the ids with the other processes of the server."""
        self._peers = peers
        if peers is not None:
            peers.add_topic(TOPIC, self._answer)

    async def claim(self, tenant: str, request_id: str) -> None:
        """Claims an id until the current task ends: the one that answers the request.

        Raises:
            InvalidRequestError: Another request of the tenant uses it.
        """
        # Of fixed length, and other processes do not learn the id.
        key = hashlib.sha256(f"{tenant} {request_id}".encode()).hexdigest()[:32]
        if key in self._in_use:
            raise _duplicate()
        self._in_use.add(key)
        task = asyncio.current_task()
        if task is not None:
            task.add_done_callback(lambda _: self._in_use.discard(key))
        if self._peers is not None and not await self._claim_in_server(self._peers, key):
            raise _duplicate()

    async def _claim_in_server(self, peers: Peers, key: str) -> bool:
        index = int(key, 16) % peers.count
        if index == peers.index:
            return await self._give(peers, key, peers.index)
        return await peers.ask_one(index, f"{TOPIC} claim {key} {peers.index}") is not False

    async def _give(self, peers: Peers, key: str, index: int) -> bool:
        """Gives an id to a process, unless another one uses it."""
        last = self._key_to_index.get(key, index)
        if last != index:
            if key in self._asked:
                return False  # two processes claim it at the same time
            self._asked.add(key)
            try:
                is_held = (
                    key in self._in_use if last == peers.index else await peers.ask_one(last, f"{TOPIC} held {key}")
                )
            finally:
                self._asked.discard(key)
            if is_held:
                return False
        self._key_to_index[key] = index
        self._key_to_index.move_to_end(key)
        if len(self._key_to_index) > MAX_REMEMBERED:
            self._key_to_index.popitem(last=False)
        return True

    async def _answer(self, question: str) -> bool:
        """The answer to another process: whether this one uses an id, or whether it may claim one."""
        word, key, *index = question.split(" ")
        if word == "held" or self._peers is None:
            return key in self._in_use
        return await self._give(self._peers, key, int(index[0]))


def _duplicate() -> InvalidRequestError:
    message = "Invalid 'request_id': a running request of this API key uses it."
    return InvalidRequestError(message, param="request_id", code="duplicate_request_id")
