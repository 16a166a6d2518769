"""What the front end needs of an engine client, by shape; the clients of `llmstack-engine-core` satisfy it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llmstack_types import EngineCoreOutputs, EngineCoreRequest, EngineReady, StepRecording


class AsyncEngineCoreClient(Protocol):
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
        """How often that has happened."""
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

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        ...

    async def recent_steps(self, after_step: int = 0, engine_index: int = 0) -> StepRecording:
        """The last steps after number `after_step` and the last events, as far as that engine core keeps them."""
        ...

    @property
    def engines(self) -> Sequence[EngineReady]:
        """What each engine core said when it was ready."""
        ...

    @property
    def sleep_level(self) -> int:
        """0 while the engine core is awake."""
        ...

    async def current_sleep_level(self) -> int:
        """`sleep_level` once all has come that the engine core had sent: another client may have changed it."""
        ...

    async def sleep(self, level: int) -> bool:
        """Gives KV storage back, and with level 2 the weights too; False while requests are running."""
        ...

    async def wake_up(self) -> None:
        """Brings back what `sleep` gave back.

        Raises:
            EngineDeadError: That failed.
        """
        ...

    async def shutdown(self) -> None:
        """Stops the engine core and removes every process, socket and file of it. Idempotent."""
        ...


class SyncEngineCoreClient(Protocol):
    """An engine core seen from plain code: in this process, or in one of its own."""

    def wait_until_ready(self) -> EngineReady:
        """As `AsyncEngineCoreClient.wait_until_ready`."""
        ...

    def add_request(self, request: EngineCoreRequest) -> None:
        """As `AsyncEngineCoreClient.add_request`."""
        ...

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """As `AsyncEngineCoreClient.abort_requests`."""
        ...

    def get_outputs(self) -> EngineCoreOutputs:
        """Runs or waits for the next step; call it only while requests are unfinished."""
        ...

    def reset_prefix_cache(self) -> bool:
        """As `AsyncEngineCoreClient.reset_prefix_cache`."""
        ...

    def recent_steps(self, after_step: int = 0) -> StepRecording:
        """As `AsyncEngineCoreClient.recent_steps`."""
        ...

    def sleep(self, level: int) -> bool:
        """As `AsyncEngineCoreClient.sleep`."""
        ...

    def wake_up(self) -> None:
        """As `AsyncEngineCoreClient.wake_up`."""
        ...

    def shutdown(self) -> None:
        """As `AsyncEngineCoreClient.shutdown`."""
        ...
