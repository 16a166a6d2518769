"""Events of an engine core: states of requests, and steps with their batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from llmstack_types.media import EncoderWork, MediaItem
from llmstack_types.scheduler_output import ScheduledRequest
from llmstack_types.stats import SchedulerStats


class RequestStatus(StrEnum):
    """The states of a request; a finished one never leaves its state.

    A request that is preempted is PREEMPTED where others needed its blocks, SWAPPED where these are on the host, and
    YIELDED where it gave its place in the steps to another tenant's request.
    """

    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING_FOR_ADAPTER = "waiting_for_adapter"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    YIELDED = "yielded"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH_CAPPED = "finished_length_capped"
    FINISHED_REPETITION = "finished_repetition"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_ERROR = "finished_error"


class RequestEvent(NamedTuple):
    """A request entered a state.

    Attributes:
        time_s: When, in monotonic seconds of the engine core's machine.
    """

    request_id: str
    status: RequestStatus
    time_s: float


class StepPhases(NamedTuple):
    """The duration of the parts of one step, in seconds.

    Attributes:
        schedule_s: Choosing the batch.
        execute_s: Computing it, with the wait for its results.
        update_s: Taking the results over.
    """

    schedule_s: float
    execute_s: float
    update_s: float


class BlockEviction(NamedTuple):
    """A KV block was allocated again; its content is gone.

    Attributes:
        lifetime_s: How long it held that.
        idle_s: Since it was last handed to a request with that in it, or filled.
        reuse_gaps_s: Between such uses, the last few.
    """

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: tuple[float, ...] = ()


class StepRecord(NamedTuple):
    """One step: its batch, and the state after it.

    Attributes:
        start_s: When it began, in monotonic seconds.
        stats: Queues and blocks after it.
        rows: The batch; under asynchronous scheduling that of the step just begun, and `stats` after the one before.
        encoder_work: What was encoded before the rows, without the items.
        media: The items of the requests that got their first row in this step, by request; each with its number.
    """

    start_s: float
    phases: StepPhases
    stats: SchedulerStats
    rows: Sequence[ScheduledRequest]
    encoder_work: Sequence[EncoderWork] = ()
    media: Mapping[str, Sequence[tuple[int, MediaItem]]] = MappingProxyType({})


class SessionReturn(NamedTuple):
    """A session has gone on: a prompt extends its last one.

    Attributes:
        request_id: The request that has gone on with it.
        last_request_id: The request before.
        paused_s: Since that ended.
        num_tokens: What that had computed, in whole blocks, as far as the prompt goes on from it.
        num_found_tokens: How many of them the prefix cache held.
        cause: Why it did not hold the others, one of `COMPUTED_CAUSES`.
        kept_s: How long after the end of the last request the first of its blocks was evicted; below 0 for not.
        evicted_for: For which request; empty for none.
    """

    request_id: str
    last_request_id: str
    paused_s: float
    num_tokens: int
    num_found_tokens: int
    cause: str
    kept_s: float
    evicted_for: str


class RequestNote(NamedTuple):
    """The facts of a request beside its steps.

    Attributes:
        num_resumed_tokens: Tokens of its answer that another engine core had generated.
        lora_name: Its adapter; empty for none.
        earlier_s: When it came, if this engine core did not run then, on the clock of its sender; else 0.
        given_s: The seconds that its client gave it; 0 for no deadline.
        went_on: The session that it has gone on with; None for none.
    """

    num_resumed_tokens: int = 0
    lora_name: str = ""
    earlier_s: float = 0.0
    given_s: float = 0.0
    went_on: SessionReturn | None = None


class StepRecording(NamedTuple):
    """The steps and events that a recorder still has, oldest first.

    Attributes:
        now_s: Monotonic seconds when it was read, for the ages of what is in it.
        steps: The last steps.
        events: The last states that requests entered.
        tenants: Request id to tenant, of the requests that have one and are not too old.
        notes: Request id to what else is known of it, where that matters.
    """

    now_s: float
    steps: Sequence[StepRecord]
    events: Sequence[RequestEvent]
    tenants: Mapping[str, str] = MappingProxyType({})
    notes: Mapping[str, RequestNote] = MappingProxyType({})
