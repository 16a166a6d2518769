"""First tokens of a log, predicted as the server does, beside the real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from llmstack_engine_core.prediction import EnginePredictor, QueuedTokens, StepLimits
from llmstack_engine_core.step_log import Run
from llmstack_engine_core.step_log.primitives import MICROSECONDS
from llmstack_engine_core.step_log.records import RequestAdded, StepScheduled
from llmstack_types import RequestEvent, StepRecord, StepRecording

# Further waiting requests count with the mean of these, as in a server.
_MAX_COUNTED: Final = 256


@dataclass(slots=True)
class _Coming:
    """A request that has no first token yet."""

    num_prompt_tokens: int
    arrival_s: float
    predicted_s: float | None = None


def predictions_of_log(run: Run, log: StepRecording) -> list[list[str | float | None]]:
    """Request ids, with the predicted and the real milliseconds to the first token in the engine core.

    A prediction knows the steps of `log` that had ended when the request came, and their durations. There is none
    before enough steps were measured. All waiting requests count, as in the order of their arrival. Waits for places
    follow from the mean length of answers; a server knows what each request asks for.
    """
    scheduler, cache = run.header.configs()
    limits = StepLimits.of(scheduler)
    following = _Following(EnginePredictor(limits, cache.block_size))
    moments: list[tuple[float, int, _Coming | StepRecord | RequestEvent, str]] = []
    if log.steps:
        first_s = log.steps[0].start_s
        moments += [(one.arrival_s, 2, one, name) for name, one in _arrivals(run) if one.arrival_s >= first_s]
    moments += [(record.start_s + sum(record.phases), 0, record, "") for record in log.steps]
    moments += [(event.time_s, 1, event, event.request_id) for event in log.events]
    num_ended = Counter(round(event.time_s, 6) for event in log.events if event.status.value.startswith("finished"))
    for time_s, _, one, request_id in sorted(moments, key=lambda moment: moment[:2]):
        if isinstance(one, _Coming):
            following.come(request_id, one)
        elif isinstance(one, StepRecord):
            # The counts of a record are those of its beginning; a server reports those of its end.
            num_left = max(one.stats.num_running - num_ended[round(time_s, 6)], 0)
            following.end_step(one._replace(stats=one.stats._replace(num_running=num_left)), time_s)
        elif one.status.value.startswith("finished"):
            following.coming.pop(request_id, None)
    return following.predictions


def _arrivals(run: Run) -> Iterator[tuple[str, _Coming]]:
    """The requests of the run; each came between the step before it and the one after it."""
    now_s = 0.0 if run.start is None else run.start.now_s
    unseen: list[tuple[str, int, float]] = []
    for event in run.events():
        match event:
            case RequestAdded(request):
                unseen.append((request.request_id, len(request.prompt_token_ids), request.arrival_time_s))
            case StepScheduled(now_us):
                before_s, now_s = now_s, now_us / MICROSECONDS
                for request_id, num_tokens, arrival_s in unseen:
                    at_s = min(max(arrival_s, before_s), now_s) if arrival_s else now_s
                    yield request_id, _Coming(num_tokens, at_s)
                unseen.clear()


class _Following:
    """The state that a server would know, moment by moment."""

    def __init__(self, predictor: EnginePredictor) -> None:
        self.coming: dict[str, _Coming] = {}
        self.predictions: list[list[str | float | None]] = []
        self._predictor = predictor
        self._began_s = 0.0

    def come(self, request_id: str, one: _Coming) -> None:
        """A request comes now."""
        num_tokens = self._num_new(one)
        prediction = self._predictor.predict(self._before(one.arrival_s), num_tokens, one.arrival_s)
        one.predicted_s = None if prediction is None else prediction.ttft_s
        self._predictor.note_arrival(num_tokens, one.arrival_s)
        self.coming[request_id] = one

    def end_step(self, record: StepRecord, end_s: float) -> None:
        """A step has ended; rows that reach the end of a prompt have their first tokens."""
        self._began_s = record.start_s
        num_tokens = sum(row.num_scheduled_tokens for row in record.rows)
        stats = record.stats._replace(num_scheduled_tokens=num_tokens, num_scheduled_rows=len(record.rows))
        self._predictor.observe(stats, end_s, sum(record.phases))
        for row in record.rows:
            one = self.coming.get(row.request_id)
            if one is None or row.num_computed_tokens + row.num_scheduled_tokens < one.num_prompt_tokens:
                continue
            del self.coming[row.request_id]
            if one.predicted_s is not None:
                self.predictions.append([row.request_id, _ms(one.predicted_s), _ms(end_s - one.arrival_s)])

    def _num_new(self, one: _Coming) -> int:
        return max(round(one.num_prompt_tokens * (1.0 - self._predictor.found_share)), 1)

    def _before(self, now_s: float) -> QueuedTokens:
        load = self._predictor.load
        num_reported = load.num_waiting
        num_waiting = num_coming = num_requests = 0
        coming_s = now_s
        for one in islice(reversed(self.coming.values()), _MAX_COUNTED):
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
