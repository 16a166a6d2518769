"""One control plane on a virtual clock, with requests whose tokens are known."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Final

from llmstack_engine_client.prediction.cost_model import CostModel, LinearCostModel, StepWork, fit_cost_model, step_work
from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_insight.rerun.recorded import Outcome, RecordedRequest
from llmstack_step_log.replay.driver import NoProgressError, SchedulerDriver
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import EngineCoreOutputs, ScheduledRequest, SchedulerOutput

# A fit of fewer steps is a guess.
MIN_NUM_STEPS: Final = 16


def fit_to_steps(steps: Sequence[tuple[StepWork, float]]) -> LinearCostModel:
    """A cost model under which the steps take as long as they did, all together.

    The fit counts relative errors, so on a busy machine it lies near the fast steps. It is scaled to the sum, without
    the slowest hundredth: these compile, or wait for another process.

    Raises:
        SimulationError: There are too few steps, or their times fit no model.
    """
    if len(steps) < MIN_NUM_STEPS:
        raise SimulationError(f"{len(steps)} steps were measured, and a cost model takes at least {MIN_NUM_STEPS}")
    model = fit_cost_model(steps)
    pairs = [(seconds, model.step_s(work)) for work, seconds in steps]
    if not all(fitted > 0 for _, fitted in pairs):
        raise SimulationError("the measured times fit no cost model: it gives some of the steps no time")
    pairs.sort(key=lambda pair: pair[0] / pair[1])
    kept = pairs[: max(len(pairs) * 99 // 100, 1)]
    factor = sum(real for real, _ in kept) / sum(fitted for _, fitted in kept)
    weights = (model.base_s, model.prefill_token_s, model.decode_row_s, model.context_token_s)
    return LinearCostModel(*(weight * factor for weight in weights))


class _Running:
    """A request inside the scheduler.

    Attributes:
        token_ids: Prompt and answer, all that will be known of it.
        num_known: How many of them the scheduler knows.
    """

    __slots__ = ("num_known", "outcome", "recorded", "token_ids")

    def __init__(self, recorded: RecordedRequest) -> None:
        request = recorded.request
        self.recorded = recorded
        self.outcome = Outcome()
        self.num_known = len(request.prompt_token_ids) + len(request.output_token_ids)
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids, *recorded.token_ids]

    def sample(self, row: ScheduledRequest) -> list[int]:
        """The output of a model runner for the row: the recorded tokens, as far as drafts are right."""
        drafts = row.draft_token_ids
        if row.num_computed_tokens + row.num_scheduled_tokens - len(drafts) != self.num_known:
            return []  # a chunk of a prompt
        sampled = self.token_ids[self.num_known : self.num_known + 1]
        for draft in drafts:
            if not sampled or sampled[-1] != draft or self.num_known + len(sampled) == len(self.token_ids):
                break
            sampled.append(self.token_ids[self.num_known + len(sampled)])
        return sampled


class Rerun:
    """A scheduler and its cache; a cost model takes the place of the model.

    What a request's client did, it does again: one that left without any token leaves at the same time, one that
    left later leaves with as many tokens.

    Attributes:
        num_steps: Steps with rows.
        num_rows: Rows of these.
        num_refused: Requests that the scheduler refused.
    """

    def __init__(self, scheduler: Scheduler, cost_model: CostModel, now_s: float = 0.0) -> None:
        self.cost_model = cost_model
        self.num_steps = self.num_rows = self.num_refused = 0
        self._driver, self._scheduler = SchedulerDriver(scheduler, now_s), scheduler
        self._arrivals: list[tuple[float, int, RecordedRequest]] = []  # a heap
        self._departures: list[tuple[float, str]] = []  # a heap
        self._running: dict[str, _Running] = {}
        self._ended: list[tuple[RecordedRequest, Outcome | None]] = []

    @property
    def now_s(self) -> float:
        """The end of the last step."""
        return self._driver.now_s

    @property
    def num_unfinished(self) -> int:
        """Requests that have been submitted and have not ended."""
        return len(self._arrivals) + len(self._running)

    def submit(self, recorded: RecordedRequest) -> None:
        """Takes a request, which comes at its time."""
        heapq.heappush(self._arrivals, (recorded.arrival_s, recorded.number, recorded))

    def take_ended(self) -> list[tuple[RecordedRequest, Outcome | None]]:
        """The requests that have ended since the last call, each with what it got; None for a refused one."""
        ended, self._ended = self._ended, []
        return ended

    def advance(self, until_s: float) -> bool:
        """Runs one step, if there is one that begins before `until_s`; returns whether there was.

        Raises:
            SimulationError: The scheduler makes no progress, or fails.
        """
        if not self._scheduler.has_unfinished_requests():
            if not self._arrivals:
                return False
            self._driver.now_s = max(self.now_s, self._arrivals[0][0])
        if self.now_s >= until_s:
            return False
        self._admit()
        self._dismiss()
        if self._scheduler.has_unfinished_requests():
            self._step()
        return True

    def _admit(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now_s:
            recorded = heapq.heappop(self._arrivals)[2]
            request_id = recorded.request.request_id
            if not self._driver.add(recorded.request):
                self.num_refused += 1
                self._ended.append((recorded, None))
                continue
            self._running[request_id] = _Running(recorded)
            if recorded.is_cut and not recorded.token_ids:
                heapq.heappush(self._departures, (recorded.end_s, request_id))

    def _dismiss(self) -> None:
        while self._departures and self._departures[0][0] <= self.now_s:
            request_id = heapq.heappop(self._departures)[1]
            if request_id in self._running:
                self._cut(request_id)

    def _cut(self, request_id: str) -> None:
        self._scheduler.abort_requests([request_id])
        self._end(request_id)

    def _step(self) -> None:
        began_s = self.now_s
        try:
            scheduled, outputs = self._driver.step(self._sample, self._step_s)
        except NoProgressError as error:
            raise SimulationError(str(error)) from error
        rows = scheduled.scheduled_requests
        self.num_steps += bool(rows)
        self.num_rows += len(rows)
        self._note_scheduled(scheduled, began_s)
        self._take(outputs)

    def _sample(self, rows: Sequence[ScheduledRequest]) -> list[list[int]]:
        return [self._running[row.request_id].sample(row) for row in rows]

    def _step_s(self, rows: Sequence[ScheduledRequest]) -> float:
        return self.cost_model.step_s(step_work(rows))

    def _note_scheduled(self, scheduled: SchedulerOutput, began_s: float) -> None:
        for request_id in scheduled.removed_request_ids:
            if request_id in self._running:
                self._running[request_id].outcome.num_preemptions += 1
        for request in scheduled.new_requests:
            running = self._running[request.request_id]
            if running.outcome.queue_s is None:
                running.outcome.queue_s = began_s - running.recorded.arrival_s

    def _take(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            running = self._running[output.request_id]
            outcome = running.outcome
            outcome.num_tokens += len(output.new_token_ids)
            running.num_known += len(output.new_token_ids)
            outcome.e2e_s = self.now_s - running.recorded.arrival_s
            if outcome.ttft_s is None:
                outcome.ttft_s = outcome.e2e_s
            if output.finish_reason is not None:
                self._end(output.request_id)
            elif running.num_known >= len(running.token_ids):
                self._cut(output.request_id)

    def _end(self, request_id: str) -> None:
        running = self._running.pop(request_id)
        running.outcome.e2e_s = max(self.now_s - running.recorded.arrival_s, 0.0)
        self._ended.append((running.recorded, running.outcome))


def rerun(requests: Iterable[RecordedRequest], scheduler: Scheduler, cost_model: CostModel) -> Sequence[Outcome | None]:
    """The outcome of each request, in order; None for one that would be refused.

    Raises:
        SimulationError: The scheduler makes no progress.
    """
    listed = list(requests)
    virtual = Rerun(scheduler, cost_model, min((one.arrival_s for one in listed), default=0.0))
    for recorded in listed:
        virtual.submit(recorded)
    while virtual.advance(float("inf")):
        pass
    ended = {id(recorded): outcome for recorded, outcome in virtual.take_ended()}
    return [ended.get(id(recorded)) for recorded in listed]
