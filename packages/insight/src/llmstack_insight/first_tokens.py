"""First tokens of a log, predicted as the server does, beside the real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from llmstack_engine_client.prediction import MAX_NUM_COUNTED, EnginePredictor, QueuedTokens, StepLimits
from llmstack_step_log import Run
from llmstack_step_log.primitives import MICROSECONDS
from llmstack_step_log.records import RequestAdded, StepScheduled
from llmstack_types import (
    EngineCoreRequest,
    RequestEvent,
    RequestProgress,
    RequestStatus,
    SamplingParams,
    StepRecord,
    StepRecording,
)

# Policies in which a later request may go first, so that no order of places is known.
_REORDERING: Final = ("fair", "deadline")


@dataclass(slots=True)
class _Request:
    """A request that has not ended."""

    num_prompt_tokens: int
    arrival_s: float
    params: SamplingParams
    predicted_s: float | None = None
    num_output_tokens: int = 0

    def progress(self) -> RequestProgress:
        """The request's progress as a server knows it."""
        return RequestProgress.of(self.num_prompt_tokens, self.num_output_tokens, self.params)


def predictions_of_log(run: Run, log: StepRecording) -> list[list[str | float | None]]:
    """Request ids, with the predicted and the real milliseconds to the first token in the engine core.

    A prediction knows the steps of `log` that had ended when the request came, and their durations. There is none
    before enough steps were measured. All waiting requests count, as in the order of their arrival. Waits for places
    follow from what each request asks for, as in a server.
    """
    scheduler, cache = run.header.configs()
    limits = StepLimits.of(scheduler)
    following = _Following(EnginePredictor(limits, cache.block_size), knows_places=scheduler.policy not in _REORDERING)
    moments: list[tuple[float, int, _Request | StepRecord | RequestEvent, str]] = []
    if log.steps:
        first_s = log.steps[0].start_s
        moments += [(one.arrival_s, 2, one, name) for name, one in _arrivals(run) if one.arrival_s >= first_s]
    moments += [(record.start_s + sum(record.phases), 0, record, "") for record in log.steps]
    moments += [(event.time_s, 1, event, event.request_id) for event in log.events]
    num_ended = Counter(round(event.time_s, 6) for event in log.events if event.status.value.startswith("finished"))
    for time_s, _, one, request_id in sorted(moments, key=lambda moment: moment[:2]):
        if isinstance(one, _Request):
            following.come(request_id, one)
        elif isinstance(one, StepRecord):
            # The counts of a record are those of its beginning; a server reports those of its end.
            num_left = max(one.stats.num_running - num_ended[round(time_s, 6)], 0)
            following.end_step(one._replace(stats=one.stats._replace(num_running=num_left)), time_s)
        elif one.status.value.startswith("finished"):
            following.end(request_id, one.status)
    return following.predictions


def _arrivals(run: Run) -> Iterator[tuple[str, _Request]]:
    """The requests of the run; each came between the step before it and the one after it."""
    now_s = 0.0 if run.start is None else run.start.now_s
    unseen: list[EngineCoreRequest] = []
    for event in run.events():
        match event:
            case RequestAdded(request):
                unseen.append(request)
            case StepScheduled(now_us):
                before_s, now_s = now_s, now_us / MICROSECONDS
                for one in unseen:
                    at_s = min(max(one.arrival_time_s, before_s), now_s) if one.arrival_time_s else now_s
                    yield one.request_id, _Request(len(one.prompt_token_ids), at_s, one.sampling_params)
                unseen.clear()


class _Following:
    """The state that a server would know, moment by moment."""

    def __init__(self, predictor: EnginePredictor, *, knows_places: bool) -> None:
        self.coming: dict[str, _Request] = {}  # without a first token
        self.begun: dict[str, _Request] = {}
        self._knows_places = knows_places
        self.predictions: list[list[str | float | None]] = []
        self._predictor = predictor
        self._began_s = 0.0

    def come(self, request_id: str, one: _Request) -> None:
        """A request comes now."""
        num_tokens = self._num_new(one)
        progress = self._progress if self._knows_places else None
        before = self._before(one.arrival_s)
        prediction = self._predictor.predict(before, num_tokens, one.arrival_s, progress, len(self.coming))
        one.predicted_s = None if prediction is None else prediction.ttft_s
        if self._predictor.known_places is not None:
            self._predictor.known_places.add(one.progress())
        self._predictor.note_arrival(num_tokens, one.arrival_s)
        self.coming[request_id] = one

    def end_step(self, record: StepRecord, end_s: float) -> None:
        """A step has ended; rows that reach the end of a prompt have their first tokens."""
        self._began_s = record.start_s
        num_tokens = sum(row.num_scheduled_tokens for row in record.rows)
        stats = record.stats._replace(num_scheduled_tokens=num_tokens, num_scheduled_rows=len(record.rows))
        self._predictor.observe(stats, end_s, sum(record.phases))
        for row in record.rows:
            name, num_computed = row.request_id, row.num_computed_tokens + row.num_scheduled_tokens
            begun = self.begun.get(name)
            if begun is not None:
                begun.num_output_tokens = max(num_computed + 1 - begun.num_prompt_tokens, begun.num_output_tokens)
                continue
            one = self.coming.get(name)
            if one is None or num_computed < one.num_prompt_tokens:
                continue
            one.num_output_tokens, self.begun[name] = 1, self.coming.pop(name)
            if one.predicted_s is not None:
                self.predictions.append([name, _ms(one.predicted_s), _ms(end_s - one.arrival_s)])

    def end(self, request_id: str, status: RequestStatus) -> None:
        """A request has ended; the lengths of answers predict those of others."""
        one = self.coming.pop(request_id, None) or self.begun.pop(request_id, None)
        if one is not None and one.num_output_tokens:
            is_stopped = status is not RequestStatus.FINISHED_LENGTH_CAPPED
            self._predictor.answer_lengths.observe(one.num_output_tokens, is_stopped=is_stopped)

    def _progress(self, max_num: int) -> list[RequestProgress]:
        return [one.progress() for one in islice(chain(self.begun.values(), self.coming.values()), max_num)]

    def _num_new(self, one: _Request) -> int:
        return max(round(one.num_prompt_tokens * (1.0 - self._predictor.found_share)), 1)

    def _before(self, now_s: float) -> QueuedTokens:
        load = self._predictor.load
        num_reported = load.num_waiting
        num_waiting = num_coming = num_requests = 0
        coming_s = now_s
        for one in islice(reversed(self.coming.values()), MAX_NUM_COUNTED):
            if one.arrival_s <= self._began_s:
                if not num_reported:
                    break  # it runs
                num_reported -= 1
            if one.arrival_s > load.end_s:
                num_coming += self._num_new(one)
                coming_s = one.arrival_s
            else:
                num_waiting += self._num_new(one)
            num_requests += 1
        return QueuedTokens(num_waiting, num_coming, num_requests, 0, coming_s)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
