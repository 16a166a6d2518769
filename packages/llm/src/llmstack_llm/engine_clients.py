"""Clients of the engine cores, started here or attached by address."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmstack_llm.engine_args import EngineArgsError
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.outputs.observers import RequestObserver
from llmstack_types import EngineReady, EngineStartError
from llmstack_types.vocabulary import RoutingPolicyName

if TYPE_CHECKING:
    from llmstack_engine_client.hosts.relay import RelayedMembers
    from llmstack_engine_core import EngineConfig
    from llmstack_llm.protocols import AsyncEngineCoreClient


def make_engine_client(
    config: EngineConfig,
    multiprocess: bool,
    addresses: Sequence[str],
    client_index: int,
    routing: RoutingPolicyName,
    *,
    can_reload: bool = False,
    members: RelayedMembers | None = None,
) -> AsyncEngineCoreClient:
    """The client that the options ask for; returns without waiting for the engine cores.

    `members`: Other machines with engine cores, of which another process of this machine is notified.

    Raises:
        EngineArgsError: Options contradict each other.
        EngineStartError: A process cannot be started, or an address is unusable.
    """
    from llmstack_engine_client import (
        attach_async_client,
        attach_hosts_client,
        attach_reloading_client,
        make_async_client,
    )
    from llmstack_engine_client.routing import RoutingPolicy

    policy = RoutingPolicy(routing)
    if members is not None:
        return attach_hosts_client(config, addresses, members, client_index=client_index, routing=policy)
    if addresses and can_reload:
        return attach_reloading_client(config, addresses, client_index=client_index, routing=policy)
    if addresses:
        return attach_async_client(
            addresses,
            client_index=client_index,
            start_timeout_s=config.start_timeout_s,
            max_restarts=config.max_restarts,
            key_file=config.key_file,
            routing=policy,
        )
    try:
        return make_async_client(config, multiprocess=multiprocess, routing=policy, can_reload=can_reload)
    except ValueError as error:
        raise EngineArgsError(str(error)) from error


def note_engine_end(client: AsyncEngineCoreClient, engine_index: int, reason: str) -> None:
    """One of several engine cores has ended, and the process that watches it starts no other one."""
    from llmstack_engine_client import BalancedClient, ReloadingClient

    if isinstance(client, BalancedClient | ReloadingClient):
        client.note_end(engine_index, reason)


def note_engine_death(client: AsyncEngineCoreClient, pid: int, how: str, *, is_outside: bool) -> None:
    """The process of an engine core has ended, as the process that watches it says."""
    from llmstack_engine_client import BalancedClient, RecoveringClient, ReloadingClient

    if isinstance(client, BalancedClient | RecoveringClient | ReloadingClient):
        client.note_death(pid, how, is_outside=is_outside)


def check_model(model_config: ModelConfig, engine: EngineReady) -> None:
    """Refuses an engine core that runs another model: its token ids would mean something else.

    Raises:
        EngineStartError: Names both.
    """
    ours = str(model_config.path)
    if engine.model_path and os.path.realpath(engine.model_path) != os.path.realpath(ours):
        raise EngineStartError(f"the engine core runs {engine.model_path}, but this front end was given {ours}")


def trace_observers(is_traced: bool) -> tuple[RequestObserver, ...]:
    """The observer that prints trace lines, where they are asked for."""
    if not is_traced:
        return ()
    from llmstack_llm.trace import TraceObserver

    return (TraceObserver(),)
