"""Client of an engine core in this process, for plain code.

`LLM(...)` uses it by default. Nothing is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_engine_core.build import build_engine_core
from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.openmp import short_spins
from llmstack_engine_core.protocols import EventHook
from llmstack_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineReady,
    EngineStartError,
    Operation,
)
from llmstack_types.control import ArgumentTs, ResultT


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

    def call(self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs) -> ResultT:
        """Asks the engine core for something besides requests; see `Control`.

        Raises:
            EngineDeadError: That failed, or a step had failed before.
        """
        core = self._living_core()
        try:
            return core.call(operation, *arguments)
        except Exception as error:  # whatever it was, scheduler and runner may no longer agree
            self._death = f"the engine core failed: {type(error).__name__} in {operation.name}"
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
                with short_spins():
                    self._core = build_engine_core(self._config, self._event_hooks)
            except ValueError as error:
                raise EngineStartError(str(error)) from error
        return self._core
