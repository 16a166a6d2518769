"""An engine core in this process: no frames, no sockets; for `LLM(...)` and for tests."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_engine_core.build import build_engine_core
from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.protocols import EventHook
from llmstack_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineReady,
    EngineStartError,
    StepRecording,
)


class InprocClient:
    """Runs the steps itself, in `get_outputs`. The model loads in `wait_until_ready`, or with the first request."""

    def __init__(self, config: EngineConfig, event_hooks: Sequence[EventHook] = ()) -> None:
        self._config = config
        self._event_hooks = event_hooks
        self._core: EngineCore | None = None
        self._death: str | None = None

    @property
    def is_dead(self) -> bool:
        """True once a step has failed, or after `shutdown`."""
        return self._death is not None

    def wait_until_ready(self) -> EngineReady:
        """Loads the model.

        Raises:
            EngineStartError: It could not start; the text says why.
        """
        return self._living_core().ready

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues one request.

        Raises:
            EngineDeadError: A step has failed.
            InvalidRequestError: The id is in use.
        """
        self._living_core().add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Ends requests; no output follows. Does nothing once the engine core is gone."""
        if self._core is not None and self._death is None:
            self._core.abort_requests(request_ids)

    def get_outputs(self) -> EngineCoreOutputs:
        """Runs the next step; call it only while requests are unfinished.

        Raises:
            EngineDeadError: This step or an earlier one has failed.
        """
        core = self._living_core()
        try:
            return core.step()
        except Exception as error:  # whatever it was, scheduler and runner no longer agree
            self._death = f"the engine core failed: {type(error).__name__}"
            raise EngineDeadError(self._death) from error

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        return self._living_core().reset_prefix_cache()

    def recent_steps(self, after_step: int = 0) -> StepRecording:
        """The last steps after number `after_step`, as far as the engine core keeps them, and the last events."""
        return self._living_core().recent_steps(after_step)

    def sleep(self, level: int) -> bool:
        """Gives the KV storage back, and with level 2 the weights too; False while requests are running."""
        return self._living_core().sleep(level)

    def wake_up(self) -> None:
        """Brings back what `sleep` gave back.

        Raises:
            EngineDeadError: That failed.
        """
        core = self._living_core()
        try:
            core.wake_up()
        except Exception as error:  # whatever it was, there is no model any more
            self._death = f"the engine core could not wake up: {type(error).__name__}"
            raise EngineDeadError(self._death) from error

    def shutdown(self) -> None:
        """Releases the device. Idempotent."""
        self._death = self._death or "the engine core has been shut down"
        if self._core is not None:
            self._core.shutdown()

    def _living_core(self) -> EngineCore:
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self._core is None:
            try:
                self._core = build_engine_core(self._config, self._event_hooks)
            except ValueError as error:
                raise EngineStartError(str(error)) from error
        return self._core
