"""Client of the engine cores of several machines, which may join at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_client.hosts.members import difference
from llmstack_engine_client.hosts.membership import Membership
from llmstack_engine_client.hosts.messages import Join
from llmstack_engine_client.recovery.recovering import RecoveringClient
from llmstack_engine_client.replicas.exchangeable import ReplicasClient
from llmstack_engine_client.replicas.remote import RemoteClient
from llmstack_engine_client.routing import RoutingPolicy
from llmstack_engine_core.config import EngineConfig, HostsConfig
from llmstack_engine_core.contract import numeric_difference
from llmstack_engine_core.ipc.link import Link
from llmstack_types import EngineReady, EngineStartError

logger = logging.getLogger(__name__)

# How often a reload looks whether the other machines are there.
LOOK_S: Final = 0.2

_ALWAYS_EQUAL = (
    "vocab_size",
    "block_size",
    "is_generative",
    "is_causal",
    "embedding_size",
    "num_labels",
    "media",
)


class HostsClient(ReplicasClient):
    """The engine cores of this machine have the first numbers; others get theirs by joining, at any time.

    It is ready with the engine cores of this machine, or with the first of another one where this has none.
    """

    def __init__(
        self,
        config: EngineConfig,
        hosts: HostsConfig,
        local: Sequence[AsyncClient | RecoveringClient],
        members: Membership,
        routing: RoutingPolicy = RoutingPolicy.EXACT,
        client_index: int = 0,
    ) -> None:
        """Begins with the engine cores of this machine.

        Args:
            config: Of an engine core.
            hosts: The engine cores of all machines.
            local: The engine cores of this machine.
            members: Which other machines there are.
            routing: How one of all is chosen for a request.
            client_index: Which of several clients of one server this is.
        """
        self._members = members
        self._joins: Mapping[int, Join] = {}
        self._num_local = len(local)
        self._start_timeout_s = config.start_timeout_s
        self._model_path = config.model.model_path
        self._promised: EngineReady | None = None
        link = Link(config.key_file, heartbeat_timeout_s=hosts.heartbeat_timeout_s)
        remote = [
            RemoteClient(link, config.start_timeout_s, partial(self._check_remote, rank), client_index)
            for rank in range(len(local), hosts.size)
        ]
        super().__init__([*local, *remote], allow_mixed_numerics=hosts.allow_mixed_numerics, routing=routing)

    @property
    def is_dead(self) -> bool:
        """True once no engine core has been there for too long, but not before the first one was."""
        return self._promised is not None and super().is_dead

    @property
    def engines(self) -> list[EngineReady]:
        """The `EngineReady` of each engine core; all name the model's folder of this machine."""
        engines = super().engines
        local = self._num_local
        return [one if one.engine_index < local else replace(one, model_path=self._model_path) for one in engines]

    @property
    def is_available(self) -> bool:
        """True while every machine with requests computes them."""
        return all(client.is_available for client in self._replicas if client.num_requests)

    @property
    def contract_id(self) -> str:
        """The numeric contract id of all that have been there; empty where they differ."""
        contract_ids = {client.contract_id for client in self._replicas} - {""}
        return contract_ids.pop() if len(contract_ids) == 1 else ""

    async def wait_until_ready(self) -> EngineReady:
        """Waits for the engine cores of this machine, or for the first of another one where none of those serves.

        In a reload it also waits for those of the machines that were there when it began.

        Raises:
            EngineStartError: One could not start, or none has joined in time; all are shut down.
        """
        ready = await self._wait_for_first()
        if not self._members.awaited:
            return ready
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not all(self._clients[rank].engines for rank in self._members.awaited):
                    if problem := self._members.find_problem():
                        raise EngineStartError(problem)
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise EngineStartError(f"other machines are not ready after {self._start_timeout_s:g} s") from None
        self._promised = min(self.engines, key=lambda one: (one.max_model_len, one.num_blocks))
        return self._promised

    async def _wait_for_first(self) -> EngineReady:
        self._members.serve(self._on_change)
        self._listen()
        self._promised = await self._wait_for(self._clients[: self._num_local])
        if self._promised is not None:
            for ready in [one for one in super().engines if one.engine_index >= self._num_local]:
                with contextlib.suppress(EngineStartError):  # it was there before there was one to compare it with
                    self._check_remote(ready.engine_index, ready)
            return self._promised
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not self.engines:
                    if problem := self._members.find_problem():
                        raise EngineStartError(problem)
                    self._has_news.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._has_news.wait(), LOOK_S)
        except TimeoutError:
            await self.shutdown()
            raise EngineStartError(f"no engine core has joined within {self._start_timeout_s:g} s") from None
        self._promised = self.engines[0]
        self._router.start()
        return self._promised

    async def shutdown(self) -> None:
        """Also tells the other machines that the endpoint ends. Idempotent."""
        await super().shutdown()
        await self._members.close()

    def _on_change(self, joins: Mapping[int, Join]) -> None:
        before, self._joins = self._joins, joins
        for join in [join for number, join in before.items() if number not in joins]:
            logger.info("%s leaves with engine cores %s", join.host, ", ".join(map(str, join.numbers)))
            # Those of a machine that joins again in its own place may have gone on.
            for rank in {*join.numbers}.difference(*(other.numbers for other in joins.values())):
                client = self._clients[rank]
                if isinstance(client, RemoteClient):
                    client.displace()
        for join in [join for number, join in joins.items() if number not in before]:
            logger.info("%s has joined with engine cores %s", join.host, ", ".join(map(str, join.numbers)))
            for rank, address in zip(join.numbers, join.addresses, strict=False):
                client = self._clients[rank]
                if isinstance(client, RemoteClient):
                    client.place(address, join.server_key)

    def _check_remote(self, rank: int, ready: EngineReady) -> None:
        """Refuses an engine core that is unlike the others, and its machine with it."""
        reason = self._difference(rank, ready)
        if reason:
            client = self._clients[rank]
            if isinstance(client, RemoteClient):
                client.displace()
            self._members.refuse(rank, reason)
            raise EngineStartError(reason)

    def _difference(self, rank: int, ready: EngineReady) -> str:
        others = [one for one in super().engines if one.engine_index != rank]
        if not others and self._promised is not None:
            others = [self._promised]
        if not others:
            return ""
        first = others[0]
        where = f"engine core {first.engine_index} and engine core {rank} on {self._members.host_of(rank)} differ"
        ours, theirs = ([(name, str(getattr(one, name))) for name in _ALWAYS_EQUAL] for one in (first, ready))
        if found := difference(ours, theirs):
            return f"{where}: {found}"
        promised = self._promised or first
        if ready.max_model_len < promised.max_model_len:
            return f"{where}: max_model_len is {promised.max_model_len}, but {ready.max_model_len}"
        found = numeric_difference(first, ready)
        return f"{where}: {found}" if found and not self._allow_mixed_numerics else ""
