"""Clients of engine cores: in this process, in other processes, or in several."""

from llmstack_engine_core.client.async_inproc import AsyncInprocClient
from llmstack_engine_core.client.async_mp import AsyncAttachedClient, AsyncMPClient
from llmstack_engine_core.client.balanced import BalancedClient
from llmstack_engine_core.client.factory import (
    attach_async_client,
    attach_hosts_client,
    attach_reloading_client,
    engine_configs,
    make_async_client,
    make_client,
)
from llmstack_engine_core.client.inproc import InprocClient
from llmstack_engine_core.client.recovering import RecoveringClient
from llmstack_engine_core.client.reloading import ReloadingClient
from llmstack_engine_core.client.sync_mp import SyncMPClient

__all__ = [
    "AsyncAttachedClient",
    "AsyncInprocClient",
    "AsyncMPClient",
    "BalancedClient",
    "InprocClient",
    "RecoveringClient",
    "ReloadingClient",
    "SyncMPClient",
    "attach_async_client",
    "attach_hosts_client",
    "attach_reloading_client",
    "engine_configs",
    "make_async_client",
    "make_client",
]
