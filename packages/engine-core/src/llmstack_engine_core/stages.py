"""Stages of an engine core, which hold requests on their way to the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, Protocol

from llmstack_engine_core.protocols import PendingOutput
from llmstack_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    InvalidRequestError,
    Operation,
    SchedulerOutput,
    SchedulerStats,
)
from llmstack_types.lifecycle import Closing

Execute = Callable[..., PendingOutput]
"""`ModelRunner.execute_model`, or what another stage makes of it."""
Operations = Mapping[Operation[Any, *tuple[Any, ...]], Callable[..., Any]]
"""Control operations, each with what does it."""
Ready = tuple[EngineCoreRequest, InvalidRequestError | None]
"""A request that waits no longer, and why it cannot go on."""


class Stage(Closing, Protocol):
    """A stage that some requests pass before the scheduler. Used by the engine core's thread; methods may be left out.

    Only a stage in use is called in a step, and only a stage that a request needs is called for it. So it costs other
    requests nothing.

    Attributes:
        waiting: The requests that it holds, which count as waiting.
    """

    waiting: Sized = ()

    @property
    def is_busy(self) -> bool:
        """True while steps are needed for what `take_ready` will return."""
        return bool(self.waiting)

    @property
    def is_in_use(self) -> bool:
        """True while it has to be called in each step; at least for as long as it holds a request."""
        return bool(self.waiting)

    def operations(self) -> Operations:
        """The control operations that it does."""
        return {}

    def check(self, request: EngineCoreRequest) -> None:
        """Refuses a request before any stage holds it.

        Raises:
            InvalidRequestError: Names the field.
        """
        return

    def hold(self, request: EngineCoreRequest) -> bool:
        """Takes in a request that needs this stage; True if the request waits here from now on.

        Raises:
            InvalidRequestError: It cannot be served.
        """
        return False

    def take_ready(self, wait_s: float) -> Iterable[Ready]:
        """The requests that wait here no longer; waits at most `wait_s` for the first of them."""
        return ()

    def execute(self, execute: Execute, scheduled: SchedulerOutput, *token_masks: object) -> PendingOutput:
        """Starts a step by `execute`, which takes the step and, for constrained rows, their masks."""
        return execute(scheduled, *token_masks)

    def update(self, step_outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """The outputs of a step as they leave the engine core, before the next step is scheduled."""
        return step_outputs

    def end_step(self, *, is_idle: bool) -> None:
        """A step is over. `is_idle`: None is under way."""
        return

    def forget(self, request_ids: Collection[str]) -> None:
        """Forgets requests that have ended; unknown ids are ignored."""
        return

    def abort(self, request_ids: list[str]) -> list[str]:
        """Forgets requests that are aborted; returns the ids that the scheduler has to abort."""
        self.forget(request_ids)
        return request_ids

    def lose_weights(self) -> None:
        """The model runner has lost its weights, and what it kept beside them; no request is left."""
        return

    def follow_weights(self, ready: EngineReady) -> None:
        """The model runner has other weights, as `ready` says; no request is left."""
        return


class AbsentStage(Stage):
    """A stage that this engine core does not have: requests that need it are refused."""

    def __init__(self, reason: str, param: str, operations: Operations | None = None) -> None:
        """`operations`: The answers to its control operations."""
        self._reason = reason
        self._param = param
        self._operations = operations or {}

    def operations(self) -> Operations:
        """The control operations, with the answers of an engine core without this stage."""
        return self._operations

    def check(self, request: EngineCoreRequest) -> None:
        """Refuses the request.

        Raises:
            InvalidRequestError: Always.
        """
        raise InvalidRequestError(self._reason, param=self._param)


class AuditStage(Stage):
    """A stage that looks at requests besides, and holds none. This one does nothing.

    Attributes:
        has_results: Whether an audit has ended.
    """

    has_results = False

    def note_request(self, request: EngineCoreRequest) -> None:
        """A request is accepted."""
        return

    def begin(self) -> None:
        """Begins an audit if one is due; the engine core has no request."""
        return

    def interrupt(self) -> None:
        """Ends the audit under way."""
        return

    def add_to(self, stats: SchedulerStats) -> SchedulerStats:
        """The statistics with the results."""
        return stats


class PrefixStage(Stage):
    """A stage of requests whose prefixes may be elsewhere than in memory. This one knows no such place.

    Attributes:
        has_stats: Whether it has statistics of its own.
    """

    has_stats = False

    def wants(self, request: EngineCoreRequest) -> bool:
        """Whether the request has to pass it."""
        return False

    def noted(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request as the scheduler gets it: with what was in the way of its blocks."""
        return request

    def distrust(self) -> None:
        """Forgets everything that came from memory, where values were wrong."""
        return

    def work_when_idle(self) -> None:
        """Does what is due; the engine core has no request."""
        return

    def add_to(self, stats: SchedulerStats) -> SchedulerStats:
        """The statistics with its own."""
        return stats


class Stages:
    """The stages of one engine core, in the order in which a request passes those that it needs.

    Attributes:
        all: In that order.
        active: The stages in use; empty while no request under way needs one.
    """

    def __init__(
        self, adapters: Stage, grammars: Stage, transfers: Stage, beams: Stage, audits: AuditStage,
        stored: PrefixStage | None = None, texts: Stage | None = None,
    ) -> None:  # fmt: skip
        """Without `stored` no prefix is anywhere but in memory; without `texts` a runner has none, or reads them."""
        self.adapters = adapters
        self.grammars = grammars
        self.transfers = transfers
        self.beams = beams
        self.audits = audits
        self.stored = stored or PrefixStage()
        self.texts = texts
        self.active: list[Stage] = []
        self.all = (adapters, grammars, *(() if texts is None else (texts,)), transfers, self.stored, beams, audits)
        self._ahead: dict[str, Iterator[Stage]] = {}  # of requests that wait: the stages that are left

    def needed_by(self, request: EngineCoreRequest) -> list[Stage]:
        """The stages that a request has to pass, in order."""
        params, needed = request.sampling_params, []
        if request.lora_name is not None:
            needed.append(self.adapters)
        if params.structured_outputs is not None:
            needed.append(self.grammars)
        if params.infill and self.texts is not None:
            needed.append(self.texts)
        if request.kv_transfer is not None:
            needed.append(self.transfers)
        if self.stored.wants(request):
            needed.append(self.stored)
        if params.use_beam_search:
            needed.append(self.beams)
        return needed

    @property
    def num_waiting(self) -> int:
        """Requests that wait in a stage."""
        return sum(len(stage.waiting) for stage in self.active)

    @property
    def is_busy(self) -> bool:
        """True while steps are needed for requests that wait in a stage."""
        return any(stage.is_busy for stage in self.active)

    def operations(self) -> Operations:
        """The control operations of all stages."""
        return {operation: do for stage in self.all for operation, do in stage.operations().items()}

    def enter(self, request: EngineCoreRequest, needed: list[Stage]) -> bool:
        """Lets a request into the stages that it needs; True if it waits in one of them.

        Raises:
            InvalidRequestError: It cannot be served; it is to be forgotten.
        """
        self._ahead[request.request_id] = iter(needed)
        return self.go_on(request)

    def go_on(self, request: EngineCoreRequest) -> bool:
        """Lets a request that a stage has held go on; True if it waits in a later one.

        Raises:
            InvalidRequestError: It cannot be served; it is to be forgotten.
        """
        for entered in self._ahead[request.request_id]:
            if entered not in self.active:
                self.active = [stage for stage in self.all if stage in self.active or stage is entered]
            if entered.hold(request):
                return True
        del self._ahead[request.request_id]
        return False

    def note_request(self, request: EngineCoreRequest) -> None:
        """A request is accepted, whatever stages it needs."""
        self.audits.note_request(request)
        if self.audits.is_in_use or self.audits in self.active:
            self.look()

    def take_ready(self, wait_s: float) -> list[Ready]:
        """The requests that can go on, those nearest to the scheduler first."""
        return [ready for stage in reversed(self.active) for ready in stage.take_ready(wait_s)]

    def execute(self, execute: Execute, scheduled: SchedulerOutput) -> PendingOutput:
        """Starts a step by the model runner's `execute`, with what the stages in use have to do with it."""
        for stage in self.active:
            execute = partial(stage.execute, execute)
        return execute(scheduled)

    def update(self, step_outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """The outputs of a step as they leave the engine core."""
        for stage in self.active:
            step_outputs = stage.update(step_outputs)
        return step_outputs

    def end_step(self, *, is_idle: bool) -> None:
        """A step is over. `is_idle`: None is under way."""
        for stage in self.active:
            stage.end_step(is_idle=is_idle)
        self.look()

    def look(self) -> None:
        """Finds the stages in use."""
        self.active = [stage for stage in self.all if stage.is_in_use]

    def forget(self, request_ids: Collection[str]) -> None:
        """Forgets requests that have ended."""
        for request_id in request_ids:
            self._ahead.pop(request_id, None)
        for stage in self.active:
            stage.forget(request_ids)
        self.look()

    def abort(self, request_ids: list[str]) -> list[str]:
        """Forgets requests that are aborted; returns the ids that the scheduler has to abort."""
        for request_id in request_ids:
            self._ahead.pop(request_id, None)
        for stage in self.active:
            request_ids = stage.abort(request_ids)
        self.look()
        return request_ids

    def lose_weights(self) -> None:
        """The model runner has lost its weights."""
        for stage in self.all:
            stage.lose_weights()

    def follow_weights(self, ready: EngineReady) -> None:
        """The model runner has other weights."""
        for stage in self.all:
            stage.follow_weights(ready)
