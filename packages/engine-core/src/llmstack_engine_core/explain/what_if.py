"""Estimates of what a request would have been alone, or with one setting changed.

The requests around it arrive again, on a clock that the cost model of the measured steps moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_engine_core.control_plane import CacheConfig, build_scheduler
from llmstack_engine_core.explain.workload import Arrival, Workload
from llmstack_engine_core.prediction.cost_model import CostModel, step_work
from llmstack_types import InvalidRequestError, ModelRunnerOutput, ScheduledRequest, SchedulerOutput

# The work of one run: so many rows in so many steps at most.
MAX_ROWS = 100_000
MAX_STEPS = 4_096
MAX_IDLE_STEPS = 16


class Times(NamedTuple):
    """Seconds from the arrival of a request to its first token and to its end."""

    ttft_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that is not as it was.

    Attributes:
        name: As on a command line, or in a sentence.
    """

    name: str
    scheduler: SchedulerConfig
    cache: CacheConfig


class TooMuchError(Exception):
    """The request does not end within the work of one run."""


def run_again(
    workload: Workload, scheduler: SchedulerConfig, cache: CacheConfig, model: CostModel, max_rows: int = MAX_ROWS
) -> Times:
    """The request's times as the same requests arrive again. O(rows), of which there are `max_rows` at most.

    Raises:
        TooMuchError: It does not end within that.
        ValueError: A setting is not valid.
    """
    return _Run(workload, build_scheduler(scheduler, cache), cache.block_size, model).times(max_rows)


def changes_to_try(workload: Workload, scheduler: SchedulerConfig, cache: CacheConfig) -> Iterator[Change]:
    """Each single change that could have made a difference; the policies only where the requests differ in them."""
    yield Change(
        f"{2 * cache.num_blocks} blocks of KV cache", scheduler, replace(cache, num_blocks=2 * cache.num_blocks)
    )
    budget, places = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    settings: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 2 * budget},
        {"max_num_batched_tokens": max(1, budget // 2)},
        {"max_num_seqs": 2 * places},
    ]
    if not scheduler.long_prefill_token_threshold and budget >= 8:
        settings.append({"long_prefill_token_threshold": budget // 4})
    requests = [one.request for one in workload.arrivals]
    differs = {
        "priority": len({request.priority for request in requests}) > 1,
        "fair": len({request.tenant for request in requests}) > 1,
        "deadline": any(request.deadline_s is not None for request in requests),
        "fcfs": True,
    }
    settings += [{"policy": name} for name, is_used in differs.items() if is_used and name != scheduler.policy]
    for changed in settings:
        name = " ".join(_flag(setting, value) for setting, value in changed.items())
        try:
            yield Change(name, replace(scheduler, **changed), cache)
        except ValueError:
            continue  # settings that exclude each other: not a choice that the operator has


def _flag(setting: str, value: object) -> str:
    return f"--{'scheduling-policy' if setting == 'policy' else setting.replace('_', '-')} {value}"


class _Run:
    def __init__(self, workload: Workload, scheduler: Scheduler, block_size: int, model: CostModel) -> None:
        self._workload = workload
        self._scheduler = scheduler
        self._model = model
        self._arrivals = {one.request.request_id: one for one in workload.arrivals}
        self._known: dict[str, int] = {}
        self._num_outputs = dict.fromkeys(self._arrivals, 0)
        self._next = 0
        self._now_s = workload.arrivals[0].time_s
        self._cache_what_was_found(workload, block_size)

    def _cache_what_was_found(self, workload: Workload, size: int) -> None:
        """Fills the prefix cache with what the requests found, as far as none of them computes it before."""
        computed: set[int] = set()
        for one in workload.arrivals:
            request = one.request
            token_ids = [*request.prompt_token_ids, *request.output_token_ids]
            keys, parent = [], hash((request.cache_salt, request.lora_name))
            for start in range(0, len(token_ids) - size + 1, size):
                parent = hash((parent, *token_ids[start : start + size]))
                keys.append(parent)
            num_found = one.num_found_tokens // size
            if request.lora_name is None and not computed.issuperset(keys[:num_found]):
                # One more token: the last one of a prompt is never taken from the cache.
                self._scheduler.import_prefix([*token_ids[: num_found * size], 0], request.cache_salt)
            computed.update(keys)

    def times(self, max_rows: int) -> Times:
        """Runs until the request has ended."""
        own, first_s, num_rows, num_idle = self._workload.own, None, 0, 0
        own_id = own.request.request_id
        for _ in range(MAX_STEPS):
            self._arrive()
            scheduled = self._scheduler.schedule(self._now_s)
            rows = scheduled.scheduled_requests
            num_rows += len(rows)
            num_idle = 0 if rows else num_idle + 1
            if num_rows > max_rows or num_idle > MAX_IDLE_STEPS:
                break
            if rows:
                self._now_s += self._model.step_s(step_work(rows))
            elif self._next < len(self._workload.arrivals):
                self._now_s = max(self._now_s, self._workload.arrivals[self._next].time_s)
            outputs = self._scheduler.update_from_output(scheduled, self._sample(scheduled), self._now_s)
            for output in outputs.outputs:
                if output.request_id == own_id:
                    first_s = self._now_s if first_s is None else first_s
                    if output.finish_reason is not None:
                        return Times(first_s - own.time_s, self._now_s - own.time_s)
            self._abort_spent()
            if own_id not in self._num_outputs and first_s is not None:
                return Times(first_s - own.time_s, self._now_s - own.time_s)
        raise TooMuchError

    def _arrive(self) -> None:
        arrivals = self._workload.arrivals
        while self._next < len(arrivals) and arrivals[self._next].time_s <= self._now_s:
            one = arrivals[self._next]
            self._next += 1
            try:
                # Each is a request of its own: blocks that two answers share are found as a prefix.
                self._scheduler.add_request(replace(one.request, fork_of=""))
            except InvalidRequestError:
                self._num_outputs.pop(one.request.request_id, None)

    def _sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        for request in scheduled.new_requests:
            self._known[request.request_id] = len(request.token_ids)
        rows = scheduled.scheduled_requests
        return ModelRunnerOutput([row.request_id for row in rows], [self._tokens_of(row) for row in rows])

    def _tokens_of(self, row: ScheduledRequest) -> list[int]:
        """What the request got in the run, as many tokens as its drafts are right."""
        request_id, num_computed, num_scheduled, _, draft_token_ids = row
        if num_computed + num_scheduled - len(draft_token_ids) != self._known[request_id]:
            return []
        one = self._arrivals[request_id]
        if one.request.pooling_params is not None:
            return []
        position = self._num_outputs.get(request_id, 0)
        following = one.output_token_ids[position : position + len(draft_token_ids) + 1] or [0]
        num_right = 0
        for drafted, token_id in zip(draft_token_ids, following, strict=False):
            if drafted != token_id:
                break
            num_right += 1
        sampled = following[: num_right + 1]
        self._known[request_id] += len(sampled)
        if request_id in self._num_outputs:
            self._num_outputs[request_id] += len(sampled)
        return sampled

    def _abort_spent(self) -> None:
        """Ends the requests that got no more tokens in the run, or were aborted by now."""
        spent = [name for name, count in self._num_outputs.items() if self._is_spent(self._arrivals[name], count)]
        self._scheduler.abort_requests(spent)
        for name in spent:
            del self._num_outputs[name]

    def _is_spent(self, one: Arrival, num_outputs: int) -> bool:
        if one.time_s > self._now_s:
            return False
        is_aborted = one.aborted_s is not None and one.aborted_s <= self._now_s
        return is_aborted or 0 < len(one.output_token_ids) <= num_outputs
