"""Client of several engine cores: a request goes to the best place for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_client.recovery.recovering import RecoveringClient
from llmstack_engine_client.replicas.live_router import LiveRouter, is_available
from llmstack_engine_client.routing import RoutingPolicy
from llmstack_engine_core.adapter_gate import LOADED, LOADING
from llmstack_engine_core.contract import numeric_difference
from llmstack_types import (
    Control,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineReady,
    EngineStartError,
    InvalidRequestError,
    Operation,
)
from llmstack_types.control import ArgumentTs, Merged, ResultT
from llmstack_types.lifecycle import ClosingParts

# More requests than any engine core has.
UNAVAILABLE: Final = 2**32


def _first(results: Sequence[object]) -> object:
    return results[0]


def _least_loaded(states: Sequence[str]) -> str:
    """The error of an adapter in one of them, else the state of the slowest."""
    return min(states, key=(LOADING, LOADED).index) if {LOADING, LOADED}.issuperset(states) else _first_error(states)


def _first_error(states: Sequence[str]) -> str:
    return next(state for state in states if state not in (LOADING, LOADED))


def _first_given(texts: Sequence[str]) -> str:
    return next(filter(None, texts), "")


def _lines(texts: Sequence[str]) -> str:
    return "\n".join(filter(None, texts))


def _sums(results: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*results, strict=True)))


MERGES: Final[Mapping[Merged, Callable[[Sequence[Any]], Any]]] = {
    "all": all, "any": any, "max": max, "first": _first, "first text": _first_given, "lines": _lines,
    "slowest": _least_loaded, "sums": _sums,
}  # fmt: skip
"""Functions that merge the results of several engine cores."""


async def _wait_for_start(client: AsyncClient | RecoveringClient) -> None:
    """Returns when it is ready, or has ended for good."""
    try:
        await client.wait_until_ready()
    except (EngineStartError, EngineDeadError):
        if not isinstance(client, RecoveringClient) or not client.is_dead:
            raise


class BalancedClient(ClosingParts):
    """One client over one per engine core; outputs say by `engine_index` which engine core they are of.

    `choose_replica` chooses, from what each engine core has cached, which it reports, and from how busy it is: the
    requests that this client has there, which it knows exactly, and those that other clients had there at its last
    report.

    The requests of an engine core that dies go on in another one with the same numeric contract id, or wait for the
    next one there. The last engine core that dies for good is the end of all. So is any without recovery.

    Attributes:
        num_unmoved_requests: Requests that had to wait, since no other engine core computes the same bits.
        num_finishing, is_exchanging: A `ReloadingClient` exchanges engine cores, and this one does not.
    """

    num_unmoved_requests, num_finishing, is_exchanging = 0, 0, False

    def __init__(
        self,
        clients: Sequence[AsyncClient | RecoveringClient],
        *,
        allow_mixed_numerics: bool = False,
        routing: RoutingPolicy = RoutingPolicy.EXACT,
    ) -> None:
        """`allow_mixed_numerics`: Engine cores may compute different bits; then no request moves between those.

        `routing`: How an engine core is chosen for a request.
        """
        super().__init__(*clients)
        self._clients = list(clients)
        self._allow_mixed_numerics = allow_mixed_numerics
        for index, client in enumerate(self._clients):
            if isinstance(client, RecoveringClient):
                client.share(partial(self._move, index))
        self._request_id_to_index: dict[str, int] = {}
        self._num_of_others = [0] * len(self._clients)
        self._router = LiveRouter(self._clients, routing)
        self._next = 0
        self._has_news = asyncio.Event()
        self._is_listening = False

    @property
    def is_dead(self) -> bool:
        """True once all replicas are gone, or one without recovery."""
        dead = [client for client in self._clients if client.is_dead]
        return len(dead) == len(self._clients) or not all(isinstance(client, RecoveringClient) for client in dead)

    @property
    def is_recovering(self) -> bool:
        """True while each of them is being replaced: no request is computed."""
        return all(client.is_recovering or client.is_dead for client in self._clients) and not self.is_dead

    @property
    def num_restarts(self) -> int:
        """The sum over all engine cores."""
        return sum(client.num_restarts for client in self._clients)

    @property
    def engines(self) -> list[EngineReady]:
        """The `EngineReady` of each engine core, in order."""
        return [
            replace(ready, engine_index=index) for index, client in enumerate(self._clients) for ready in client.engines
        ]

    @property
    def sleep_level(self) -> int:
        """The deepest of theirs."""
        return max(client.sleep_level for client in self._clients)

    async def wait_until_ready(self) -> EngineReady:
        """Waits for all but those that have ended; the result holds for each: it has the smallest of their KV caches.

        Raises:
            EngineStartError: One could not start, or all have ended; all are shut down.
        """
        ready = await self._wait_for(self._clients)
        if ready is None:
            await self.shutdown()
            raise EngineStartError("all engine cores have ended")
        return ready

    async def _wait_for(self, clients: Sequence[AsyncClient | RecoveringClient]) -> EngineReady | None:
        """Waits for these, which come first; None where all of them have ended for good."""
        waiting = [asyncio.ensure_future(_wait_for_start(client)) for client in clients]
        try:
            await asyncio.gather(*waiting)
        except (EngineStartError, EngineDeadError) as error:
            index = next(index for index, task in enumerate(waiting) if task.done() and task.exception() is error)
            await self.shutdown()
            await asyncio.gather(*waiting, return_exceptions=True)
            raise type(error)(f"engine {index}: {error}") from error
        engines = [ready for ready in self.engines if ready.engine_index < len(clients)]
        if not engines:
            return None
        for other in engines[1:]:
            difference = numeric_difference(engines[0], other)
            if difference and not self._allow_mixed_numerics:
                await self.shutdown()
                pair = f"engine {engines[0].engine_index} and engine {other.engine_index}"
                raise EngineStartError(f"{pair}: {difference}")
        self._router.start()
        return min(engines, key=lambda ready: (ready.max_model_len, ready.num_blocks))

    def note_end(self, index: int, reason: str) -> None:
        """An engine core has ended, and the process that watches it starts no other one."""
        client = self._clients[index]
        if isinstance(client, RecoveringClient):
            client.end(reason)

    def note_death(self, pid: int, how: str, *, is_outside: bool) -> None:
        """As `RecoveringClient.note_death`, of whichever it was."""
        for client in self._clients:
            if isinstance(client, RecoveringClient):
                client.note_death(pid, how, is_outside=is_outside)

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Sends one request to an engine core; a fork follows its parent.

        Raises:
            EngineDeadError: An engine core is gone.
            InvalidRequestError: The id is in use.
        """
        self._check_alive()
        await self._router.follow()
        request_id = request.request_id
        if request_id in self._request_id_to_index:
            raise InvalidRequestError("The request id is in use.", param="request_id", code="duplicate_request_id")
        parent = self._request_id_to_index.get(request.fork_of) if request.fork_of else None
        index = self._router.choose(request, self._nums_requests()) if parent is None else parent
        self._request_id_to_index[request_id] = index
        try:
            await self._clients[index].add_request(request)
        except ValueError:
            self._request_id_to_index.pop(request_id, None)
            self._router.end([request_id])
            raise

    def _nums_requests(self) -> list[int]:
        pairs = zip(self._clients, self._num_of_others, strict=True)
        return [client.num_requests + num_of_others for client, num_of_others in pairs]

    def _loads(self) -> list[int]:
        """The requests of each replica; beyond all limits where nothing computes them."""
        pairs = zip(self._clients, self._nums_requests(), strict=True)
        return [num_requests + (0 if is_available(client) else UNAVAILABLE) for client, num_requests in pairs]

    def _move(self, index: int, requests: Sequence[EngineCoreRequest], are_suspects: bool) -> bool:
        """Lets another engine core go on with requests of one that died; False where none computes the same bits.

        Those of one that has died for good may wait in the place of one that is being replaced.
        """
        contract_id = self._clients[index].contract_id
        loads = self._loads()
        others = [other for other, load in enumerate(loads) if other != index and load < UNAVAILABLE]
        if self._clients[index].is_dead and not others:  # for good: they wait for one that is being replaced
            others = [other for other, client in enumerate(self._clients) if other != index and not client.is_dead]
        for other in sorted(others, key=loads.__getitem__):
            client = self._clients[other]
            if isinstance(client, RecoveringClient) and contract_id and client.contract_id == contract_id:
                self._request_id_to_index |= dict.fromkeys([request.request_id for request in requests], other)
                client.adopt(requests, is_suspect=are_suspects)
                return True
        self.num_unmoved_requests += len(requests) if others else 0
        return False

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Ends requests; unknown ones are ignored."""
        index_to_ids: dict[int, list[str]] = {}
        for request_id in request_ids:
            index = self._request_id_to_index.pop(request_id, None)
            if index is not None:
                index_to_ids.setdefault(index, []).append(request_id)
        self._router.end(request_ids)
        for index, ids in index_to_ids.items():
            await self._clients[index].abort_requests(ids)

    async def get_outputs(self) -> EngineCoreOutputs:
        """Waits for the outputs of the next step of any engine core; they take turns.

        Raises:
            EngineDeadError: One is gone.
        """
        self._listen()
        while True:
            self._has_news.clear()
            outputs = self.get_outputs_nowait()
            if outputs is not None:
                return outputs
            await self._has_news.wait()

    def get_outputs_nowait(self) -> EngineCoreOutputs | None:
        """Outputs that have come from any engine core, or None; they take turns.

        Raises:
            EngineDeadError: There are none, and one is gone.
        """
        death: EngineDeadError | None = None
        for _ in self._clients:
            index, self._next = self._next, (self._next + 1) % len(self._clients)
            try:
                outputs = self._take_outputs(index)
            except EngineDeadError as error:  # another one may still have something
                death = death or error
                continue
            if outputs is not None:
                return outputs
        if death is not None:
            raise death
        self._check_alive()
        return None

    async def call(
        self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs, engine_index: int | None = None
    ) -> ResultT:
        """Asks one engine core, or all at once; of their results `MERGES` makes one.

        All are sent to sleep or none: those that did are woken where another has running requests.
        """
        if engine_index is not None:
            return await self._clients[engine_index].call(operation, *arguments)
        present = [client for client in self._clients if is_available(client)]
        asked = present or [client for client in self._clients if not client.is_dead] or self._clients
        results = await asyncio.gather(*(client.call(operation, *arguments) for client in asked))
        if operation == Control.SLEEP and not all(results):
            await self.call(Control.WAKE_UP)
        combined: ResultT = MERGES[operation.merged](results)
        return combined

    def _listen(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            for client in self._clients:
                client.listen(self._has_news.set)

    def _take_outputs(self, index: int) -> EngineCoreOutputs | None:
        client = self._clients[index]
        self._router.catch_up(index)
        try:
            outputs = client.get_outputs_nowait()
        except EngineDeadError as error:
            if self.is_dead:
                raise EngineDeadError(f"engine {index}: {error}") from error
            return None  # the others go on
        if outputs is None:
            return None
        self._router.note(outputs.outputs)
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self._request_id_to_index.pop(output.request_id, None)
        stats = outputs.scheduler_stats
        if stats is not None:
            self._num_of_others[index] = max(0, stats.num_running + stats.num_waiting - client.num_requests)
        return outputs._replace(engine_index=index)

    def _check_alive(self) -> None:
        if not self.is_dead:
            return
        for index, client in enumerate(self._clients):
            if client.is_dead:
                raise EngineDeadError(f"engine {index}: the engine core is gone")
