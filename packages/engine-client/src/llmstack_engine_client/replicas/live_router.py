"""The router of a client of several engine cores, which follows their caches."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence

from llmstack_core_scheduler.media_numbers import routing_keys
from llmstack_core_scheduler.request import prefix_salt
from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_client.recovery.recovering import RecoveringClient
from llmstack_engine_client.routing import Router, RoutingPolicy
from llmstack_types import EngineCoreOutput, EngineCoreRequest, EngineDeadError

logger = logging.getLogger(__name__)


def is_available(client: AsyncClient | RecoveringClient) -> bool:
    """Whether there is an engine core that computes whatever it is sent."""
    return client.is_available if isinstance(client, RecoveringClient) else not client.is_dead


class LiveRouter:
    """Passes on to a `Router` what the engine cores report, and chooses among them.

    Attributes:
        router: The router that chooses.
    """

    def __init__(self, clients: Sequence[AsyncClient | RecoveringClient], policy: RoutingPolicy) -> None:
        self.router = Router(len(clients), policy)
        self._clients = clients
        self._nums_restarts = [0] * len(clients)
        self._unfollowed: dict[int, None] = {}
        self._waiting: set[str] = set()

    def start(self) -> None:
        """All engine cores are ready. Their caches are followed where the policy needs it."""
        sizes = {ready.block_size for client in self._clients for ready in client.engines}
        if self.router.policy is not RoutingPolicy.EXACT:
            return
        if len(sizes) > 1:
            logger.warning("the engine cores have blocks of %s tokens: requests go by load alone", sorted(sizes))
            return
        self.router.set_block_size(sizes.pop())
        self._unfollowed = dict.fromkeys(range(len(self._clients)))

    async def follow(self) -> None:
        """Reads all reports, and follows the caches of engine cores that are new or whose reports have a gap."""
        for index in range(len(self._clients)):
            self.catch_up(index)
        for index in list(self._unfollowed):
            client = self._clients[index]
            if is_available(client):
                del self._unfollowed[index]
                with contextlib.suppress(EngineDeadError):  # it is followed again when another one has started
                    await client.follow_cache()

    def choose(self, request: EngineCoreRequest, num_requests: Sequence[int]) -> int:
        """The engine core for a request; `num_requests`: by engine core, those in flight."""
        available = [is_available(client) for client in self._clients]
        if not any(available):  # it waits where another engine core is expected soon
            available = [not client.is_dead for client in self._clients]
        self._waiting.add(request.request_id)
        salt = prefix_salt(request.cache_salt, request.lora_name)
        keys = routing_keys(request.prompt_token_ids, request.media)
        return self.router.route(request.request_id, keys, salt, num_requests, available)

    def catch_up(self, index: int) -> None:
        """Takes what an engine core has reported since the last call."""
        client = self._clients[index]
        if client.num_restarts != self._nums_restarts[index]:
            self._nums_restarts[index] = client.num_restarts
            self.router.restart(index)
            if self.router.follows_caches:
                self._unfollowed[index] = None
        for update in client.take_cache_updates():
            if not self.router.apply(index, update):
                self._unfollowed[index] = None  # it missed a report, and gets everything again

    def note(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Notes requests that begin or end with these outputs."""
        for output in outputs:
            if output.request_id in self._waiting and output.new_token_ids:
                self._waiting.discard(output.request_id)
                self.router.begin(output.request_id)
            if output.finish_reason is not None:
                self.end([output.request_id])

    def end(self, request_ids: Iterable[str]) -> None:
        """Notes requests that end without an output."""
        for request_id in request_ids:
            self._waiting.discard(request_id)
            self.router.end(request_id)
