"""The steps and states of one request, taken out of those of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from llmstack_types import (
    EncoderWork,
    MediaItem,
    RequestEvent,
    RequestNote,
    RequestStatus,
    ScheduledRequest,
    StepRecord,
    StepRecording,
)

FOREIGN = "another key's request"
# Tokens of another key are shown as a power of two, and at least this: a length would tell one prompt from others.
LEAST_FOREIGN_TOKENS = 64
# Less is the way between two processes; more is the clock of another machine.
LEAST_EARLIER_S, MOST_EARLIER_S = 0.05, 3600.0
_NO_NOTE = RequestNote()
PREEMPTIONS = (RequestStatus.PREEMPTED, RequestStatus.SWAPPED, RequestStatus.YIELDED)


class UnknownRequestError(Exception):
    """An unknown request: it never came, or its steps are no longer kept."""


@dataclass(frozen=True)
class History:
    """One request among the others.

    Attributes:
        name_of: The name by which another request may be called.
        steps: All steps, oldest first.
        own: The steps that the request took part in, with its row.
        events: The states that it entered, oldest first.
        notes: What else is known of requests, by their ids.
        siblings: The requests of its answer.
        num_beams: Of a beam search, which has one row for all beams of a step.
    """

    request_id: str
    name_of: Callable[[str], str]
    steps: Sequence[StepRecord]
    own: Sequence[tuple[StepRecord, ScheduledRequest]]
    events: Sequence[RequestEvent]
    notes: Mapping[str, RequestNote]
    siblings: Container[str] = ()
    num_beams: int = 0

    @classmethod
    def of(
        cls,
        log: StepRecording,
        request_id: str,
        name_of: Callable[[str], str],
        siblings: Container[str] = (),
        num_beams: int = 0,
    ) -> History:
        """Takes it out of the log.

        Raises:
            UnknownRequestError: The log has nothing of this request.
        """
        own = [(record, row) for record in log.steps for row in record.rows if row.request_id == request_id]
        events = [event for event in log.events if event.request_id == request_id]
        if not own and not events:
            raise UnknownRequestError(request_id)
        return cls(request_id, name_of, log.steps, own, events, log.notes, siblings, num_beams)

    @property
    def num_resumed_tokens(self) -> int:
        """Tokens of its answer that another engine core had generated."""
        return self.note_of(self.request_id).num_resumed_tokens

    @property
    def earlier_s(self) -> float:
        """Seconds from its arrival until this engine core received it, if that did not run then; else 0."""
        came_s = self.note_of(self.request_id).earlier_s
        passed_s = self.start_s - came_s
        return passed_s if came_s and LEAST_EARLIER_S < passed_s < MOST_EARLIER_S else 0.0

    @cached_property
    def media(self) -> Sequence[tuple[int, MediaItem]]:
        """The items of its prompt, each with its number; empty where its first row is no longer kept."""
        return next((record.media[self.request_id] for record in self.steps if self.request_id in record.media), ())

    def encoder_work_of(self, number: int, item: MediaItem) -> list[tuple[StepRecord, EncoderWork]]:
        """The encoder's work on one of its items, from its beginning until its rows had read the item."""
        last = [record for record, row in self.own if row.num_computed_tokens < item.end]
        if not last or not self.has_beginning:
            return []
        steps = [*self.steps_between(self.first_s, last[-1].start_s), last[-1]]
        return [(record, part) for record in steps for part in record.encoder_work if part.media_id == number]

    @cached_property
    def encoder_steps(self) -> list[StepRecord]:
        """The steps that encoded items of the request, without those in which it had a row."""
        found = {id(record): record for one in self.media for record, _ in self.encoder_work_of(*one)}
        rows = {id(record) for record, _ in self.own}
        return [record for one, record in found.items() if one not in rows]

    def note_of(self, request_id: str) -> RequestNote:
        """The further facts of a request."""
        return self.notes.get(request_id, _NO_NOTE)

    def adapters(self, record: StepRecord) -> set[str]:
        """The adapters of a step."""
        return {self.note_of(row.request_id).lora_name for row in record.rows} - {""}

    @property
    def queued_s(self) -> float | None:
        """When it began to wait for its first step; None where that is no longer known."""
        return next((event.time_s for event in self.events if event.status is RequestStatus.WAITING), None)

    @property
    def arrived_s(self) -> float | None:
        """When it came; None where that is no longer known."""
        first = self.events[0] if self.events else None
        return first.time_s if first is not None and first.status.value.startswith("waiting") else None

    @cached_property
    def begun_s(self) -> float | None:
        """When it was given its first step; None where it was not, or where that is no longer known."""
        return next((event.time_s for event in self.events if event.status is RequestStatus.RUNNING), None)

    @property
    def kept_since_s(self) -> float:
        """The beginning of the oldest step that is kept."""
        return self.steps[0].start_s if self.steps else math.inf

    @property
    def lacks_first_step(self) -> bool:
        """Whether it began in a step that is no longer kept, though it is known when. States are kept for longer."""
        return self.begun_s is not None and self.begun_s < self.kept_since_s

    @property
    def has_beginning(self) -> bool:
        """Whether it is known when it came, and its first step is kept."""
        return bool(self.own) and self.queued_s is not None and not self.lacks_first_step

    @property
    def status(self) -> RequestStatus | None:
        """The last state that it entered."""
        return self.events[-1].status if self.events else None

    @property
    def end_s(self) -> float:
        """The time of its end; for a running request, the end of its last step.

        A request ends within its last step, with the state that says so. States are kept for longer than steps.
        """
        return end_of(self.own[-1][0]) if self.own and not self.is_over else self.events[-1].time_s

    @property
    def first_s(self) -> float:
        """When it was given the first of its kept steps. The state that says so is kept for longer than the step."""
        return self.own[0][0].start_s if self.begun_s is None or not self.has_beginning else self.begun_s

    def seconds_of(self, record: StepRecord) -> float:
        """Seconds of a step between its first step and its end."""
        return max(0.0, min(end_of(record), self.end_s) - max(record.start_s, self.first_s))

    @property
    def start_s(self) -> float:
        """When it came; else the beginning of the first step that is kept."""
        if self.arrived_s is not None:
            return self.arrived_s
        return self.own[0][0].start_s if self.own else self.end_s

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.status is not None and self.status.value.startswith("finished")

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache held."""
        return self.own[0][1].num_computed_tokens if self.own else 0

    @cached_property
    def num_prefill_steps(self) -> int:
        """Its first steps, up to the one that gave the first token; of the last ones alone, those with its prompt."""
        chunks = 0
        for _, row in self.own:
            if row.num_scheduled_tokens - len(row.draft_token_ids) == 1:
                break
            chunks += 1
        return max(1, chunks) if self.has_beginning else chunks

    @property
    def prefill(self) -> Sequence[tuple[StepRecord, ScheduledRequest]]:
        """The steps that computed its prompt."""
        return self.own[: self.num_prefill_steps]

    @property
    def decodes(self) -> Sequence[tuple[StepRecord, ScheduledRequest]]:
        """The steps after its first token."""
        return self.own[self.num_prefill_steps :]

    def steps_between(self, start_s: float, end_s: float) -> list[StepRecord]:
        """Steps that were computed in a span of time, at least in part."""
        return [record for record in self.steps if record.start_s < end_s and end_of(record) > start_s]

    def is_foreign(self, request_ids: Iterable[str]) -> bool:
        """Whether one of these requests is another key's."""
        return any(self.name_of(request_id) == FOREIGN for request_id in request_ids)

    def shown_tokens(self, num_tokens: int, request_ids: Iterable[str]) -> int:
        """A number of other requests' tokens, rounded up where one of them is another key's."""
        if not num_tokens or not self.is_foreign(request_ids):
            return num_tokens
        return max(LEAST_FOREIGN_TOKENS, 1 << (num_tokens - 1).bit_length())

    def others(self, record: StepRecord) -> list[ScheduledRequest]:
        """The rows of a step that are not its own."""
        return [row for row in record.rows if row.request_id != self.request_id]


def num_tokens_of(record: StepRecord) -> int:
    """Tokens that a step computes."""
    return sum(row.num_scheduled_tokens for row in record.rows)


def duration_of(record: StepRecord) -> float:
    """Seconds of a step."""
    return sum(record.phases)


def end_of(record: StepRecord) -> float:
    """When a step ended."""
    return record.start_s + duration_of(record)


def num_prefill_tokens(rows: Sequence[ScheduledRequest]) -> int:
    """Tokens of prompts among what rows compute."""
    return sum(row.num_scheduled_tokens for row in rows if row.num_scheduled_tokens - len(row.draft_token_ids) > 1)
