"""Protocols of the engine clients that the front ends use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llmstack_types import EngineCoreOutputs, EngineCoreRequest, EngineReady, Operation
from llmstack_types.control import ArgumentTs, ResultT
from llmstack_types.lifecycle import AsyncClosing, Closing


class AsyncEngineCoreClient(AsyncClosing, Protocol):
    """An engine core seen from an event loop. Not thread safe: one loop uses it."""

    async def wait_until_ready(self) -> EngineReady:
        """Waits for the engine core's first message.

        Raises:
            EngineStartError: It could not start; the text says why.
        """
        ...

    @property
    def is_dead(self) -> bool:
        """True once the engine core is gone."""
        ...

    @property
    def is_recovering(self) -> bool:
        """True while another engine core takes the place of one that died; requests wait for it."""
        ...

    @property
    def num_restarts(self) -> int:
        """The number of engine cores that were replaced after a crash."""
        ...

    @property
    def num_unmoved_requests(self) -> int:
        """Requests of a lost engine core that waited, since the others compute different bits."""
        ...

    @property
    def num_finishing(self) -> int:
        """Requests that finish in the engine core before this one."""
        ...

    @property
    def is_exchanging(self) -> bool:
        """True while new requests wait for the next engine core."""
        ...

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Sends one request.

        Raises:
            EngineDeadError: The engine core is gone.
        """
        ...

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Ends requests; no output follows the engine's receipt. Does nothing once the engine core is gone."""
        ...

    async def get_outputs(self) -> EngineCoreOutputs:
        """Waits for the outputs of the next step.

        Raises:
            EngineDeadError: The engine core is gone.
        """
        ...

    async def call(
        self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs, engine_index: int | None = None
    ) -> ResultT:
        """Asks the engine core for something besides requests; see `Control`.

        `engine_index`: Which engine core, where there are several; None asks all.

        Raises:
            EngineDeadError: The engine core is gone.
        """
        ...

    @property
    def engines(self) -> Sequence[EngineReady]:
        """The `EngineReady` of each engine core."""
        ...

    @property
    def sleep_level(self) -> int:
        """0 while the engine core is awake."""
        ...


class SyncEngineCoreClient(Closing, Protocol):
    """An engine core seen from plain code: in this process, or in one of its own."""

    def wait_until_ready(self) -> EngineReady: ...

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def abort_requests(self, request_ids: Sequence[str]) -> None: ...

    def get_outputs(self) -> EngineCoreOutputs:
        """Runs or waits for the next step; call it only while requests are unfinished."""
        ...

    def call(self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs) -> ResultT: ...
