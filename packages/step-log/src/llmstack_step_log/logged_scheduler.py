"""A scheduler whose inputs and decisions go to a step log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from llmstack_step_log.decisions import (
    pack_forked,
    pack_imported,
    pack_refused,
    pack_released,
    pack_reset,
)
from llmstack_step_log.primitives import MICROSECONDS
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_step_log.snapshots import State, take_state
from llmstack_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    InvalidRequestError,
    ModelRunnerOutput,
    PrefixMedia,
    SchedulerOutput,
    SchedulerStats,
    SessionReturn,
)
from llmstack_types.media import NO_MEDIA


class SchedulerLog(Protocol):
    """A receiver of the calls and decisions of a scheduler: `StepLog`, or `DeferredLog`.

    Nothing that it is given may change afterwards, new requests apart. `schedule` and `update` are for calls that the
    scheduler does not return from.
    """

    @property
    def snapshot_steps(self) -> int: ...
    def snapshots_from(self, take_state: Callable[[], State]) -> None: ...
    def add_request(self, request: EngineCoreRequest) -> None: ...
    def fork_request(self, parent_id: str, child: EngineCoreRequest) -> None: ...
    def abort_requests(self, request_ids: list[str]) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def release_sessions(self, tenant: str, name: str) -> None: ...
    def import_prefix(self, token_ids: list[int], salt: str, media: PrefixMedia) -> None: ...
    def mark(self) -> None: ...
    def step(self, now_us: int, scheduled: SchedulerOutput) -> None: ...
    def result(
        self, now_us: int, lag: int, sampled_token_ids: list[list[int]], errors: Mapping[str, str],
        outputs: EngineCoreOutputs,
    ) -> None: ...  # fmt: skip
    def schedule(self, now_us: int) -> None: ...
    def update(self, now_us: int, lag: int, sampled_token_ids: list[list[int]], errors: Mapping[str, str]) -> None: ...
    def decide(self, packed: bytes) -> None: ...
    def flush(self) -> None: ...


class LoggedScheduler:
    """Satisfies `Scheduler` by passing every call on. Times reach the scheduler in whole microseconds, as recorded."""

    def __init__(self, scheduler: Scheduler, log: SchedulerLog) -> None:
        self._scheduler = scheduler
        self._log = log
        self._step = self._num_steps = 0
        self._next_mark = log.snapshot_steps or -1
        self._under_way: dict[int, SchedulerOutput] = {}
        log.snapshots_from(self._take_state)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: The scheduler refuses it.
        """
        self._log.add_request(request)
        try:
            self._scheduler.add_request(request)
        except InvalidRequestError:
            self._log.decide(pack_refused(request.request_id))
            raise

    def fork_request(self, parent_id: str, child: EngineCoreRequest) -> int:
        """Adds a request that goes on from where a running one is.

        Raises:
            InvalidRequestError: The scheduler refuses it.
        """
        self._log.fork_request(parent_id, child)
        try:
            num_tokens = self._scheduler.fork_request(parent_id, child)
        except InvalidRequestError:
            self._log.decide(pack_refused(child.request_id))
            raise
        self._log.decide(pack_forked(child.request_id, num_tokens))
        return num_tokens

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once."""
        aborted = list(request_ids)
        if aborted:
            self._log.abort_requests(aborted)
            self._scheduler.abort_requests(aborted)

    def has_unfinished_requests(self) -> bool:
        """True while a step could return outputs; the log is flushed once there is none."""
        has_unfinished = self._scheduler.has_unfinished_requests()
        if not has_unfinished:
            self._log.flush()
        return has_unfinished

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Chooses the rows of the next step."""
        now_us = round(now_s * MICROSECONDS)
        if self._num_steps == self._next_mark:
            self._log.mark()
            self._next_mark += self._log.snapshot_steps
        self._num_steps += 1
        try:
            scheduled = self._scheduler.schedule(now_us / MICROSECONDS)
        except BaseException:
            self._log.schedule(now_us)  # the log of a crash ends with what caused it
            raise
        self._log.step(now_us, scheduled)
        self._step = scheduled.step
        self._under_way[scheduled.step] = scheduled
        return scheduled

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, now_s: float
    ) -> EngineCoreOutputs:
        """Applies the step's results."""
        now_us = round(now_s * MICROSECONDS)
        lag = self._step - scheduled.step
        try:
            outputs = self._scheduler.update_from_output(scheduled, output, now_us / MICROSECONDS)
        except BaseException:
            self._log.update(now_us, lag, output.sampled_token_ids, output.errors)
            raise
        self._log.result(now_us, lag, output.sampled_token_ids, output.errors, outputs)
        self._under_way.pop(scheduled.step, None)
        return outputs

    def _take_state(self) -> State:
        return take_state(self._scheduler, self._under_way)

    def stats(self) -> SchedulerStats:
        """The state after the last step."""
        return self._scheduler.stats()

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        self._log.reset_prefix_cache()
        is_done = self._scheduler.reset_prefix_cache()
        self._log.decide(pack_reset(is_done))
        return is_done

    def release_sessions(self, owner: str, name: str) -> tuple[int, int]:
        """Gives up the sessions of an owner that have a name."""
        self._log.release_sessions(owner, name)
        released = self._scheduler.release_sessions(owner, name)
        self._log.decide(pack_released(*released))
        return released

    def take_returns(self) -> list[SessionReturn]:
        """The sessions that have gone on; not logged, since it decides nothing."""
        return self._scheduler.take_returns()

    def cached_prefix(
        self, token_ids: Sequence[int], salt: str = "", media: PrefixMedia = NO_MEDIA
    ) -> tuple[list[int], int]:
        """The blocks of the longest cached prefix; not logged, since it decides nothing."""
        return self._scheduler.cached_prefix(token_ids, salt, media)

    def contents(self, block_ids: Iterable[int]) -> list[int]:
        """The contents of cached blocks; not logged, since it decides nothing."""
        return self._scheduler.contents(block_ids)

    def import_prefix(
        self, token_ids: Sequence[int], salt: str = "", media: PrefixMedia = NO_MEDIA
    ) -> tuple[list[int], int]:
        """Makes another engine core's blocks findable."""
        self._log.import_prefix(list(token_ids), salt, media)
        imported = self._scheduler.import_prefix(token_ids, salt, media)
        self._log.decide(pack_imported(*imported))
        return imported
