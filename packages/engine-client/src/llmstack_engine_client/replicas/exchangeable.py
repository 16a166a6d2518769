"""Engine cores that a reload can exchange: one, or several replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

from llmstack_engine_client.recovery.recovering import RecoveringClient
from llmstack_engine_client.replicas.balanced import BalancedClient
from llmstack_engine_core.adapter_gate import LOADED, LOADING
from llmstack_types import Control, EngineCoreRequest, EngineStartError

LOAD_POLL_S: Final = 0.01


class ReplicasClient(BalancedClient):
    """Replicas that are exchanged together; offers what `RecoveringClient` does for a reload."""

    @cached_property
    def _replicas(self) -> list[RecoveringClient]:
        """The replicas with recovery, which are all that an endpoint with reloads has."""
        return [client for client in self._clients if isinstance(client, RecoveringClient)]

    @property
    def num_requests(self) -> int:
        """Requests in flight, in all of them."""
        return sum(client.num_requests for client in self._replicas)

    @property
    def has_own_outputs(self) -> bool:
        """Whether errors or statistics that come from no engine core are still to be taken."""
        return any(client.has_own_outputs for client in self._replicas)

    @property
    def is_available(self) -> bool:
        """True while each of the engine cores computes its requests."""
        return all(client.is_available for client in self._replicas)

    @property
    def contract_id(self) -> str:
        """The numeric contract id of all; empty where they differ."""
        contract_ids = {client.contract_id for client in self._replicas}
        return contract_ids.pop() if len(contract_ids) == 1 else ""

    def has_request(self, request_id: str) -> bool:
        """Whether the request is in flight here."""
        return any(client.has_request(request_id) for client in self._replicas)

    def give_away(self) -> list[EngineCoreRequest]:
        """As `ResumingClient.give_away`, of all."""
        given = [request for client in self._replicas for request in client.give_away()]
        for request in given:
            self._request_id_to_index.pop(request.request_id, None)
        self._router.end([request.request_id for request in given])
        return given

    def receive(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Goes on with what other engine cores gave away; a beam search stays together."""
        index_to_requests: dict[int, list[EngineCoreRequest]] = {}
        nums_requests = self._nums_requests()
        for request in requests:
            index = self._request_id_to_index.get(request.fork_of) if request.fork_of else None
            if index is None:
                index = self._router.choose(request, nums_requests)
            self._request_id_to_index[request.request_id] = index
            nums_requests[index] += 1
            index_to_requests.setdefault(index, []).append(request)
        for index, group in index_to_requests.items():
            self._replicas[index].receive(group)

    def retire(self) -> None:
        """As `RecoveringClient.retire`; the requests of one that dies for good go on in another one."""
        for client in self._replicas:
            client.drop_spares()

    def listen(self, on_news: Callable[[], None]) -> None:
        """Calls `on_news` whenever something has come from one of them, or one is gone."""
        self._is_listening = True
        for client in self._replicas:
            client.listen(on_news)


Exchangeable = RecoveringClient | ReplicasClient


def check_move(old: Exchangeable, client: Exchangeable) -> None:
    """Checks that requests may go on in other engine cores.

    Raises:
        EngineStartError: Their text could be another one, or one of them may be about to crash it.
    """
    if not old.contract_id or old.contract_id != client.contract_id:
        raise EngineStartError(
            "running requests cannot move: the numeric contract is another one, so their texts would be, too; "
            "let them finish"
        )
    if not old.is_available:
        raise EngineStartError("running requests cannot move: their engine core has crashed, and is being replaced")


async def load_adapters(client: Exchangeable, adapters: Callable[[], Sequence[tuple[str, str]]]) -> None:
    """Loads adapters until none has been added meanwhile.

    Raises:
        EngineStartError: One cannot be loaded.
        EngineDeadError: There is no engine core for them.
    """
    loaded: set[str] = set()
    while missing := [one for one in adapters() if one[0] not in loaded]:
        for identity, path in missing:
            while (state := await client.call(Control.LOAD_ADAPTER, identity, path)) == LOADING:  # noqa: ASYNC110 - it only answers
                await asyncio.sleep(LOAD_POLL_S)
            if state != LOADED:
                raise EngineStartError(f"an adapter cannot be loaded: {state}")
            loaded.add(identity)
