"""Choice of the client for a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from llmstack_engine_client.clients.async_mp import AsyncAttachedClient, AsyncMPClient
from llmstack_engine_client.clients.sync_mp import SyncMPClient
from llmstack_engine_client.hosts.relay import RelayedMembers
from llmstack_engine_client.hosts.rendezvous import Rendezvous
from llmstack_engine_client.processes.launcher import make_spares
from llmstack_engine_client.processes.spare import Spares
from llmstack_engine_client.recovery.recovering import RecoveringClient
from llmstack_engine_client.replicas.balanced import BalancedClient
from llmstack_engine_client.replicas.exchangeable import Exchangeable, ReplicasClient
from llmstack_engine_client.replicas.hosts import HostsClient
from llmstack_engine_client.replicas.reloading import ReloadingClient
from llmstack_engine_client.routing import RoutingPolicy
from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.ipc.link import Link
from llmstack_types import EngineStartError

if TYPE_CHECKING:
    from llmstack_engine_client.clients.async_inproc import AsyncInprocClient
    from llmstack_engine_client.clients.inproc import InprocClient

    AnyAsyncClient = (
        AsyncInprocClient | AsyncMPClient | AsyncAttachedClient | RecoveringClient | BalancedClient | ReloadingClient
    )


def make_client(config: EngineConfig, *, multiprocess: bool = False) -> InprocClient | SyncMPClient:
    """A client for plain code, with an engine core of its own."""
    if multiprocess:
        return SyncMPClient(config)
    from llmstack_engine_client.clients.inproc import InprocClient  # late: it imports the whole engine core

    return InprocClient(config)


def make_async_client(
    config: EngineConfig,
    *,
    multiprocess: bool = True,
    routing: RoutingPolicy = RoutingPolicy.EXACT,
    can_reload: bool = False,
) -> AnyAsyncClient:
    """A client for an event loop, with as many engine cores of its own as the configuration says.

    `routing`: How one of several engine cores is chosen for a request.
    `can_reload`: Whether the engine core can be exchanged for another one.

    Raises:
        EngineStartError: A process cannot be started.
        ValueError: Several engine cores were asked for in this process, or what cannot be exchanged is to be.
    """
    configs = engine_configs(config)
    if can_reload:
        if not multiprocess:
            raise ValueError("a reload needs engine cores in processes of their own")
        if config.hosts is not None:
            return ReloadingClient(config, partial(_start_hosts, Rendezvous(config), routing=routing))
        return ReloadingClient(config, partial(_start_exchangeable, routing=routing))
    if not multiprocess:
        if len(configs) > 1:
            raise ValueError("one process holds one engine core; several need processes of their own")
        from llmstack_engine_client.clients.async_inproc import AsyncInprocClient  # late: as above

        return AsyncInprocClient(config)
    if config.hosts is not None and not config.hosts.num_local:
        configs = []
    members = None if config.hosts is None else Rendezvous(config).open(config.hosts.weights_name)
    spares = make_spares(config)
    clients = [_start(one, spares) for one in configs]
    if config.hosts is not None and members is not None:
        return HostsClient(config, config.hosts, clients, members, routing)
    return clients[0] if len(clients) == 1 else BalancedClient(clients, routing=routing)


def _start(config: EngineConfig, spares: Spares | None) -> AsyncMPClient | RecoveringClient:
    if not config.max_restarts:
        return AsyncMPClient(config)
    return _recovering(config, spares)


def _start_exchangeable(config: EngineConfig, addresses: Sequence[str], *, routing: RoutingPolicy) -> Exchangeable:
    if addresses:
        raise ValueError("these engine cores are started here")
    spares = make_spares(config)
    clients = [_recovering(one, spares) for one in engine_configs(config)]
    return clients[0] if len(clients) == 1 else ReplicasClient(clients, routing=routing)


def _start_hosts(
    rendezvous: Rendezvous, config: EngineConfig, addresses: Sequence[str], *, routing: RoutingPolicy
) -> HostsClient:
    if addresses or config.hosts is None:
        raise ValueError("these engine cores are started here, and by the other machines")
    spares = make_spares(config)
    configs = engine_configs(config) if config.hosts.num_local else []
    local = [_recovering(one, spares) for one in configs]
    members = rendezvous.open(config.hosts.weights_name)
    return HostsClient(config, config.hosts, local, members, routing)


def _recovering(config: EngineConfig, spares: Spares | None) -> RecoveringClient:
    return RecoveringClient(partial(AsyncMPClient, config, spares), config.max_restarts, spares=spares)


def attach_async_client(
    addresses: Sequence[str],
    *,
    client_index: int = 0,
    start_timeout_s: float,
    max_restarts: int = 0,
    key_file: str | None = None,
    routing: RoutingPolicy = RoutingPolicy.EXACT,
) -> AsyncAttachedClient | RecoveringClient | BalancedClient:
    """A client for an event loop over engine cores that another program runs.

    `client_index`: Which of several clients of one server this is.
    `max_restarts`: How often within a minute it waits for another engine core at the address of one that crashed, and
    goes on with its requests there; 0 ends them.
    `key_file`: The keys for TCP addresses.
    `routing`: How one of several engine cores is chosen for a request.

    Raises:
        EngineStartError: No engine core may listen at such an address.
    """
    clients = _attached(addresses, client_index, start_timeout_s, max_restarts, Link(key_file))
    return clients[0] if len(clients) == 1 else BalancedClient(clients, routing=routing)


def attach_hosts_client(
    config: EngineConfig,
    addresses: Sequence[str],
    members: RelayedMembers,
    *,
    client_index: int = 0,
    routing: RoutingPolicy = RoutingPolicy.EXACT,
) -> HostsClient:
    """As `attach_async_client`, with the engine cores of other machines, of which another process is notified.

    `addresses`: The engine cores of this machine, which have the first numbers.

    Raises:
        EngineStartError: No engine core may listen at such an address.
        ValueError: There are no other machines.
    """
    if config.hosts is None:
        raise ValueError("there are no other machines")
    local = _attached(addresses, client_index, config.start_timeout_s, config.max_restarts, Link())
    return HostsClient(config, config.hosts, local, members, routing, client_index)


def _attached(
    addresses: Sequence[str], client_index: int, start_timeout_s: float, max_restarts: int, link: Link
) -> list[AsyncAttachedClient | RecoveringClient]:
    starts = [partial(AsyncAttachedClient, address, client_index, start_timeout_s, link) for address in addresses]
    return [RecoveringClient(start, max_restarts, client_index) if max_restarts else start() for start in starts]


def attach_reloading_client(
    config: EngineConfig,
    addresses: Sequence[str],
    *,
    client_index: int = 0,
    routing: RoutingPolicy = RoutingPolicy.EXACT,
) -> ReloadingClient:
    """As `attach_async_client`, and the engine cores can be exchanged for others that run already.

    Raises:
        EngineStartError: No engine core may listen at such an address.
    """

    def attach(config: EngineConfig, addresses: Sequence[str]) -> Exchangeable:
        if not addresses:
            raise EngineStartError("another program runs the engine cores")
        link, timeout_s = Link(), config.start_timeout_s
        starts = [partial(AsyncAttachedClient, address, client_index, timeout_s, link) for address in addresses]
        clients = [RecoveringClient(start, config.max_restarts, client_index) for start in starts]
        return clients[0] if len(clients) == 1 else ReplicasClient(clients, routing=routing)

    return ReloadingClient(config, attach, addresses)


def engine_configs(config: EngineConfig) -> list[EngineConfig]:
    """One configuration for each engine core: they differ in their GPUs, files and events only."""
    num_engines, num_ranks = config.model.num_engines, config.model.num_local_ranks
    models = [replace(config.model, first_gpu=index * num_ranks) for index in range(num_engines)]
    configs = [replace(config, model=model) for model in models]
    if num_engines > 1 and config.record_steps is not None:
        configs = [replace(one, record_steps=f"{config.record_steps}.{index}") for index, one in enumerate(configs)]
    if num_engines > 1 and config.kv_cache_dir is not None:
        num_bytes = max(config.kv_cache_disk_bytes // num_engines, 1 << 20)
        configs = [
            replace(one, kv_cache_dir=f"{config.kv_cache_dir}.{index}", kv_cache_disk_bytes=num_bytes)
            for index, one in enumerate(configs)
        ]
    if config.kv_events is not None:
        events = config.kv_events
        configs = [
            replace(one, kv_events=replace(events, data_parallel_rank=events.data_parallel_rank + index))
            for index, one in enumerate(configs)
        ]
    return configs
