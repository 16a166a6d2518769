"""Decisions of a scheduler that is fed with the events of a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from llmstack_step_log.decisions import (
    DecisionHash,
    pack_forked,
    pack_imported,
    pack_refused,
    pack_released,
    pack_reset,
    pack_scheduled,
    pack_updated,
)
from llmstack_step_log.errors import StepLogError
from llmstack_step_log.primitives import MICROSECONDS
from llmstack_step_log.records import (
    Checkpoint,
    Event,
    Gap,
    Marked,
    PrefixCacheReset,
    PrefixImported,
    RequestAdded,
    RequestForked,
    RequestsAborted,
    SessionsReleased,
    Snapshotted,
    StepScheduled,
    StepUpdated,
)
from llmstack_step_log.replay.driver import SchedulerDriver
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_step_log.snapshots import Snapshot, state_digest, take_state


class DecisionsDifferError(StepLogError):
    """The scheduler decides something else than it did in the recorded run; the text says from where on."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision.

    Attributes:
        step: The last step scheduled.
        now_us: The time of the run.
        packed: The decision in canonical form.
    """

    step: int
    now_us: int
    packed: bytes


@dataclass(frozen=True, slots=True)
class PassedMark:
    """The moment of a snapshot.

    Attributes:
        recorded: The hash of the state in the recorded run, where the log has it.
        derived: Computes that of the scheduler.
    """

    num_steps: int
    recorded: bytes | None
    derived: Callable[[], bytes]


def derive_decisions(
    events: Iterable[Event], scheduler: Scheduler, start: Snapshot | None = None
) -> Iterator[Decision | Checkpoint | PassedMark]:
    """The decisions of `scheduler` for the events of the log, with the log's checkpoints and marks between them.

    `start`: The snapshot that scheduler and events begin with; None for the beginning.

    Raises:
        StepLogError: The beginning of the log is missing, or a record cannot be read.
        DecisionsDifferError: A step has other rows than the results that were recorded for it.
    """
    deriver = _Deriver(scheduler, start)
    for event in events:
        if isinstance(event, Checkpoint):
            yield event
        elif isinstance(event, Marked):
            yield PassedMark(event.num_steps, event.state_digest, deriver.state_digest)
        elif isinstance(event, Gap):
            raise StepLogError(
                f"lacks its first {event.num_steps} steps, which were no longer kept in memory: --from-step begins at "
                "a snapshot after them, and a log of --record-steps has all"
            )
        elif not isinstance(event, Snapshotted):
            packed = deriver.apply(event)
            if packed is not None:
                yield Decision(deriver.step, deriver.now_us, packed)


def proven(items: Iterable[Decision | Checkpoint | PassedMark], start: Snapshot | None = None) -> Iterator[Decision]:
    """The decisions, whose running hash has to be that of each checkpoint, and the state that of each snapshot.

    Raises:
        DecisionsDifferError: Something was decided differently; the text says between which steps.
    """
    decided = DecisionHash()
    proven_steps = 0
    if start is not None:
        decided, proven_steps = DecisionHash(start.place.digest), start.place.num_steps
    for item in items:
        if isinstance(item, Decision):
            decided.add(item.packed)
            yield item
        elif isinstance(item, PassedMark):
            if start is not None and item.num_steps == start.place.num_steps:
                continue  # it begins here
            decided.restart()
            if item.recorded is not None and item.derived() != item.recorded:
                raise DecisionsDifferError(f"the state at step {item.num_steps} is not that of the recorded snapshot")
        elif item.digest != decided.digest():
            raise DecisionsDifferError(
                f"a decision between steps {proven_steps} and {item.num_steps} is not the recorded one"
            )
        else:
            proven_steps = item.num_steps


class _Deriver:
    def __init__(self, scheduler: Scheduler, start: Snapshot | None) -> None:
        if start is None:
            self._driver, self.now_us = SchedulerDriver(scheduler), 0
        else:
            place = start.place
            self._driver = SchedulerDriver(scheduler, start.now_s, place.num_steps, start.steps_under_way())
            self.now_us = place.last_us

    @property
    def step(self) -> int:
        """The number of the last step scheduled."""
        return self._driver.num_steps

    def state_digest(self) -> bytes:
        return state_digest(take_state(self._driver.scheduler, self._driver.under_way))

    def apply(self, event: Event) -> bytes | None:
        """The decision that follows from the event, if any."""
        driver = self._driver
        match event:
            case RequestAdded(request):
                return None if driver.add(request) else pack_refused(request.request_id)
            case RequestForked(parent_id, request):
                if (num_tokens := driver.fork(parent_id, request)) is None:
                    return pack_refused(request.request_id)
                return pack_forked(request.request_id, num_tokens)
            case RequestsAborted(request_ids):
                driver.scheduler.abort_requests(request_ids)
            case StepScheduled(now_us):
                self.now_us = now_us
                return pack_scheduled(driver.schedule(now_us / MICROSECONDS))
            case StepUpdated():
                return self._update(event)
            case PrefixCacheReset():
                return pack_reset(driver.scheduler.reset_prefix_cache())
            case SessionsReleased(tenant, name):
                return pack_released(*driver.scheduler.release_sessions(tenant, name))
            case PrefixImported(token_ids, salt, media):
                return pack_imported(*driver.scheduler.import_prefix(token_ids, salt, media))
        return None

    def _update(self, event: StepUpdated) -> bytes:
        self.now_us = event.now_us
        step, sampled = self.step - event.lag, event.sampled_token_ids
        scheduled = self._driver.under_way.get(step)
        if scheduled is None or len(scheduled.scheduled_requests) != len(sampled):
            raise DecisionsDifferError(f"step {step} has other rows than in the recorded run")
        return pack_updated(self._driver.update(step, sampled, event.now_us / MICROSECONDS, event.errors))
