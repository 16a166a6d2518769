"""Client of an engine core on another machine, which may leave and rejoin."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Final

from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_client.clients.async_mp import AsyncAttachedClient
from llmstack_engine_client.recovery.recovering import RecoveringClient
from llmstack_engine_core.ipc.link import Link
from llmstack_engine_core.messages.protocol import ClientMessage
from llmstack_types import EngineDeadError, EngineLostError, EngineReady, EngineStartError

logger = logging.getLogger(__name__)

# Requests that no other engine core can continue wait for so long; so does an endpoint without any engine core.
MAX_ABSENCE_S: Final = 60.0
RETRY_S: Final = 0.5


class AbsentClient(AsyncClient):
    """Stand-in for an engine core that is absent."""

    def __init__(self) -> None:
        super().__init__(start_timeout_s=MAX_ABSENCE_S)

    async def shutdown(self) -> None:
        """Has nothing to give back."""
        self._mailbox.set_dead("there is no engine core")

    async def _send(self, message: ClientMessage) -> None:
        raise EngineDeadError("there is no engine core")

    def _attach(self) -> None:
        """There is nothing to receive from."""


class RemoteClient(RecoveringClient):
    """An engine core of another machine, at the address that its machine tells when it joins.

    Each connection has an epoch: the engine core ends what an earlier one has left, and nothing reads what still comes
    for an earlier one. A connection without a sign of life ends after the time-out of its heartbeats.
    """

    def __init__(
        self, link: Link, start_timeout_s: float, check: Callable[[EngineReady], None], client_index: int = 0
    ) -> None:
        """Begins without an engine core.

        Args:
            link: How to reach it; the rest of it comes with the address.
            start_timeout_s: How long it may load its model.
            check: Raises EngineStartError for one that must not be used.
            client_index: Which of several clients of one server this is.
        """
        super().__init__(AbsentClient, max_restarts=0)
        self._link, self._start_timeout_s, self._check = link, start_timeout_s, check
        self._client_index = client_index
        self._address = ""
        self._server_key: bytes | None = None
        self._name, self._epoch = secrets.token_hex(8), 0
        self._is_lost = True
        self._has_changed = asyncio.Event()
        self._was_ready = True  # it recovers from the beginning
        self._turn = client_index

    @property
    def is_dead(self) -> bool:
        """True while it is not there, and has not been for too long to wait for it."""
        return self._is_lost or super().is_dead

    @property
    def is_available(self) -> bool:
        """True while it is there."""
        return not self._is_lost and super().is_available

    def place(self, address: str, server_key: bytes) -> None:
        """Sets the address, of a new process or of the one before."""
        self._address, self._server_key = address, server_key or None
        self._has_changed.set()

    def displace(self) -> None:
        """Takes the engine core out of use, until it has a place again."""
        self._address = ""
        self._has_changed.set()
        if self.engines:
            self._recover("it is not to be used any more")

    def listen(self, on_news: Callable[[], None] | None) -> None:
        """Also begins to look for the engine core."""
        super().listen(on_news)
        if self._recovery is None and not self.engines:
            self._recover("it has not joined")

    async def wait_until_ready(self) -> EngineReady:
        """Waits until it has joined.

        Raises:
            EngineDeadError: It will not.
        """
        while not self.engines:
            if self._death is not None:
                raise EngineDeadError(self._death)
            if self._recovery is None:
                self._recover("it has not joined")
            else:
                await asyncio.wait([self._recovery])
        return self.engines[0]

    async def _start_another(self, reason: str, *, is_search: bool) -> str | None:
        """Waits until the machine is there again, however long that takes."""
        await self._client.shutdown()
        self._client = AbsentClient()
        if self._contract_id:
            logger.error(
                "the engine core at %s is gone (%s): %d requests wait", self._address, reason, len(self._journal)
            )
        losing = asyncio.get_running_loop().call_later(MAX_ABSENCE_S, self._lose)
        try:
            while not await self._attach():
                self._has_changed.clear()
                try:
                    await asyncio.wait_for(self._has_changed.wait(), RETRY_S if self._address else None)
                except TimeoutError:
                    continue
        finally:
            losing.cancel()
        return None

    async def _attach(self) -> bool:
        """Whether the engine core is there and welcome."""
        if not self._address:
            return False
        self._has_changed.clear()
        self._epoch += 1
        link = Link(
            self._link.key_file, self._server_key, self._link.heartbeat_timeout_s, self._name, self._epoch
        )  # fmt: skip
        try:
            client = AsyncAttachedClient(self._address, self._client_index, self._start_timeout_s, link)
        except EngineStartError as error:
            logger.error("an engine core cannot be used: %s", error)
            self._address = ""
            return False
        ready = None
        try:
            ready = await self._ready_of(client)
        finally:
            if ready is None:
                await client.shutdown()
        if ready is None:
            return False
        self._client = client
        client.listen(self._wake)
        self._is_other_model |= self._contract_id not in ("", ready.numeric_contract_id)
        if self._contract_id:
            self.num_restarts += 1
        self._contract_id, self._is_lost = ready.numeric_contract_id, False
        logger.info("the engine core at %s serves", self._address)
        return True

    async def _ready_of(self, client: AsyncAttachedClient) -> EngineReady | None:
        """The message of an engine core that is ready; None where it is not, or has moved meanwhile."""
        waiting = asyncio.ensure_future(client.wait_until_ready())
        moving = asyncio.ensure_future(self._has_changed.wait())
        try:
            await asyncio.wait((waiting, moving), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return None
            ready = waiting.result()
            self._check(ready)
        except EngineStartError as error:
            logger.warning("the engine core at %s cannot be used: %s", self._address, error)
            return None
        except EngineDeadError:  # it ended, or the connection did
            return None
        finally:
            for task in (waiting, moving):
                task.cancel()
            await asyncio.gather(waiting, moving, return_exceptions=True)
        return ready

    def _lose(self) -> None:
        """Gives up an engine core that is away for too long: its requests end, where no other one can continue them."""
        self._is_lost = True
        self._hand_over(self._journal.request_ids, are_suspects=True)
        for request_id in self._journal.request_ids:
            self._release_soon(self._fail(request_id, EngineLostError.TEXT))
        self._wake()
