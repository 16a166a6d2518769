"""NIXL's agent over UCX, for host memory and one network interface."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import time
from collections.abc import Callable
from typing import Any, Final

from llmstack_engine_core.kv_transfer.tag import KVTransferError
from llmstack_types import EngineStartError

_OPTION: Final = "--kv-transfer-config"
_MEMORY: Final = "DRAM"
_POLL_S: Final = 0.0002
_MAX_READS: Final = 256
_DONE: Final = "DONE"
_UNDER_WAY: Final = "PROC"


class NixlAgent:
    """One agent of NIXL, for one thread at a time.

    It has no thread of its own, since that one would never sleep: who exports calls `progress` while others read.

    Attributes:
        is_worn: It has read often. Connections stay open until the agent ends, so a new one has to take its place.
    """

    def __init__(self, name: str, interface: str) -> None:
        """Starts UCX.

        Raises:
            EngineStartError: NIXL is not installed, or cannot use the interface.
        """
        # UCX reads them when it is loaded. The network has no keys: it is the one that the operator trusts, no other.
        os.environ["UCX_NET_DEVICES"] = interface
        os.environ.setdefault("UCX_TLS", "tcp,self")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        self.is_worn = False
        self._num_reads = 0
        try:
            api = importlib.import_module("nixl._api")
        except ImportError as error:
            raise EngineStartError(
                f"{_OPTION}: NixlConnector needs NIXL: pip install 'llmstack-engine-core[nixl]'"
            ) from error
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(name, config)
        except Exception as error:  # its errors have no common class
            raise EngineStartError(f"{_OPTION}: NIXL cannot use the network interface {interface}: {error}") from error
        if "UCX" not in self._agent.backends:
            raise EngineStartError(f"{_OPTION}: this build of NIXL has no UCX")

    def register(self, memory: mmap.mmap) -> Registration:
        """Registers memory that others may read, until the registration is closed."""
        return Registration(self._agent, memory)

    def metadata(self) -> bytes:
        """The description by which others read the memory that is registered now."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def progress(self) -> None:
        """Makes progress on the reads of other engine cores."""
        self._agent.get_new_notifs()

    def read(
        self, metadata: bytes, address: int, into: mmap.mmap, deadline_s: float, clock: Callable[[], float]
    ) -> None:
        """Reads the memory of another agent; after an error this agent must not be used again.

        Raises:
            KVTransferError: It cannot be read within the time.
        """
        self._num_reads += 1
        self.is_worn = self._num_reads >= _MAX_READS
        try:
            other = self._agent.add_remote_agent(metadata)
            with self.register(into) as own:
                self._read(other, own, address, deadline_s, clock)
        except KVTransferError:
            raise
        except Exception as error:
            raise KVTransferError(f"NIXL cannot read the blocks: {type(error).__name__}") from error

    def _read(
        self, other: object, own: Registration, address: int, deadline_s: float, clock: Callable[[], float]
    ) -> None:
        ours = self._agent.get_xfer_descs([(own.address, own.num_bytes, 0)], _MEMORY)
        theirs = self._agent.get_xfer_descs([(address, own.num_bytes, 0)], _MEMORY)
        handle = self._agent.initialize_xfer("READ", ours, theirs, other)
        try:
            state = self._agent.transfer(handle)
            while state == _UNDER_WAY:
                if clock() > deadline_s:
                    raise KVTransferError("the blocks came too late")
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
        finally:
            with contextlib.suppress(Exception):  # one that is under way ends with the agent
                handle.release()
        if state != _DONE:
            raise KVTransferError(f"NIXL cannot read the blocks: {state}")


class Registration:
    """Memory that an agent may read or write; the memory must outlive it."""

    def __init__(self, agent: Any, memory: mmap.mmap) -> None:
        self._agent = agent
        self._view: ctypes.c_char | None = ctypes.c_char.from_buffer(memory)  # keeps the memory in its place
        self.address = ctypes.addressof(self._view)
        self.num_bytes = len(memory)
        self._registered = agent.register_memory([(self.address, self.num_bytes, 0, "")], _MEMORY)

    def close(self) -> None:
        """Takes the memory back from the agent. Idempotent."""
        if self._view is not None:
            self._agent.deregister_memory(self._registered)
            self._view = None

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
