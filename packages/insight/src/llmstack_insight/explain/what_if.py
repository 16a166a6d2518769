"""Estimates of what a request would have been alone, or with one setting changed.

The requests around it arrive again, on a clock that the cost model of the measured steps moves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_engine_client.prediction.cost_model import CostModel
from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_insight.explain.workload import Arrival, Workload
from llmstack_insight.rerun import Outcome, RecordedRequest, Rerun
from llmstack_step_log.control_plane import CacheConfig, build_scheduler

# The work of one run, and that of all runs of an explanation: a row takes about three microseconds.
MAX_ROWS = 100_000
MAX_ROWS_IN_ALL = 400_000
MAX_STEPS = 4_096


class Times(NamedTuple):
    """Seconds from the arrival of a request to its first token and to its end."""

    ttft_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """One setting with another value.

    Attributes:
        name: As on a command line, or in a sentence.
    """

    name: str
    scheduler: SchedulerConfig
    cache: CacheConfig


@dataclass(slots=True)
class Work:
    """The rows that runs may compute.

    Attributes:
        max_rows: In each.
        num_left: In all that are still to come.
        until_s: When no run may go on, by the monotonic clock: a busy machine takes longer for the same rows.
    """

    max_rows: int = MAX_ROWS
    num_left: int = MAX_ROWS_IN_ALL
    until_s: float = math.inf

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.until_s


class TooMuchError(Exception):
    """The request does not end within the work of one run."""


def run_again(
    workload: Workload, scheduler: SchedulerConfig, cache: CacheConfig, model: CostModel, work: Work | None = None
) -> Times:
    """The request's times as the same requests arrive again. O(rows), which `work` limits and counts.

    Raises:
        TooMuchError: It does not end within that.
        ValueError: A setting is not valid.
    """
    work = work or Work()
    max_rows = min(work.max_rows, work.num_left)
    plane = build_scheduler(scheduler, cache)
    _cache_what_was_found(plane, workload, cache.block_size)
    virtual = Rerun(plane, model, workload.arrivals[0].time_s)
    for number, one in enumerate(workload.arrivals):
        virtual.submit(_recorded(one, number))
    try:
        while virtual.num_rows <= max_rows and virtual.num_steps < MAX_STEPS and virtual.advance(math.inf):
            if work.is_late:
                break
            for recorded, outcome in virtual.take_ended():
                if recorded.request.request_id == workload.request_id and outcome is not None:
                    return Times(outcome.e2e_s if outcome.ttft_s is None else outcome.ttft_s, outcome.e2e_s)
    except SimulationError as error:
        raise TooMuchError from error
    finally:
        work.num_left -= virtual.num_rows
    raise TooMuchError


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
    if scheduler.max_prefill_tokens:
        settings.append({"max_prefill_tokens": 0})
    requests = [one.request for one in workload.arrivals]
    if 0 < scheduler.max_loras < len({request.lora_name for request in requests} - {None}):
        settings.append({"max_loras": 2 * scheduler.max_loras})
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


def _cache_what_was_found(scheduler: Scheduler, workload: Workload, size: int) -> None:
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
            scheduler.import_prefix([*token_ids[: num_found * size], 0], request.cache_salt)
        computed.update(keys)


def _recorded(one: Arrival, number: int) -> RecordedRequest:
    """The request with its recorded answer: it gets the same tokens, or leaves at the same time."""
    # Each is a request of its own: blocks that two answers share are found as a prefix.
    request, token_ids = replace(one.request, fork_of=""), one.output_token_ids
    is_cut = one.aborted_s is not None
    if not token_ids and not is_cut and request.pooling_params is None:
        # Its tokens came later than the workload, and are not known.
        token_ids = [0] * min(request.sampling_params.max_tokens or 1, MAX_STEPS)
    stayed_s = math.inf if one.aborted_s is None else max(one.aborted_s - one.time_s, 0.0)
    return RecordedRequest(request, one.time_s, number, token_ids, is_cut, Outcome(e2e_s=stayed_s))
