"""Clients of engine cores: in this process, in other processes, or in several.

Names are imported when they are first used: `llmstack --help` loads this package for the command in it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmstack_engine_client.clients.async_inproc import AsyncInprocClient
    from llmstack_engine_client.clients.async_mp import AsyncAttachedClient, AsyncMPClient
    from llmstack_engine_client.clients.inproc import InprocClient
    from llmstack_engine_client.clients.sync_mp import SyncMPClient
    from llmstack_engine_client.factory import (
        attach_async_client,
        attach_hosts_client,
        attach_reloading_client,
        engine_configs,
        make_async_client,
        make_client,
    )
    from llmstack_engine_client.recovery.recovering import RecoveringClient
    from llmstack_engine_client.replicas.balanced import BalancedClient
    from llmstack_engine_client.replicas.reloading import ReloadingClient

_MODULES = {
    "AsyncAttachedClient": "clients.async_mp",
    "AsyncInprocClient": "clients.async_inproc",
    "AsyncMPClient": "clients.async_mp",
    "BalancedClient": "replicas.balanced",
    "InprocClient": "clients.inproc",
    "RecoveringClient": "recovery.recovering",
    "ReloadingClient": "replicas.reloading",
    "SyncMPClient": "clients.sync_mp",
    "attach_async_client": "factory",
    "attach_hosts_client": "factory",
    "attach_reloading_client": "factory",
    "engine_configs": "factory",
    "make_async_client": "factory",
    "make_client": "factory",
}

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


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
