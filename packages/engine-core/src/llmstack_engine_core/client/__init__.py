"""Engine cores seen from a front end: in this process, or in one of their own."""

from llmstack_engine_core.client.async_mp import AsyncMPClient
from llmstack_engine_core.client.inproc import InprocClient
from llmstack_engine_core.client.sync_mp import SyncMPClient

__all__ = ["AsyncMPClient", "InprocClient", "SyncMPClient"]
