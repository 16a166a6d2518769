"""Snapshots of a scheduler: its state as plain data, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

from llmstack_core_scheduler.deadline_queue import DeadlineQueue, _can_lose_deadline
from llmstack_core_scheduler.draft_lengths import AcceptanceRate
from llmstack_core_scheduler.drafting import Drafting
from llmstack_core_scheduler.fair_queue import FairQueue
from llmstack_core_scheduler.model_drafts import ModelDrafts
from llmstack_core_scheduler.ngram_drafts import NgramDrafts, _NgramIndex
from llmstack_core_scheduler.preemption import CheapestPreemption
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.scheduler import Scheduler
from llmstack_core_scheduler.step_plan import StepUnderWay
from llmstack_core_scheduler.suffix_drafts import SuffixDrafts
from llmstack_core_scheduler.tenant_turns import Tenant
from llmstack_core_scheduler.waiting_queue import WaitingQueue
from llmstack_types import EngineCoreRequest, RequestStatus, SamplingParams

State = dict[str, Any]
"""Builtins only, which msgpack and JSON can hold."""

# What follows from a request's arrival and the configuration alone is not listed.
_COUNTS: Final = (
    "num_tokens", "max_num_tokens", "max_num_slots", "num_computed_tokens", "num_slots", "next_passed_token",
    "num_queued_tokens", "num_queued_prefill_tokens", "num_paid_tokens", "has_lost_deadline", "num_preemptions",
    "num_overtakers", "is_protected", "recompute_step", "has_more_to_tell", "num_cached_tokens",
    "num_known_tokens", "num_lost_tokens", "num_media_seen",
)  # fmt: skip
_TOKENS: Final = 3
_NUMBERS: Final = 7
_counts_of = attrgetter(*_COUNTS)


def num_snapshot_requests(scheduler: Scheduler) -> int:
    """The number of requests in a snapshot; O(1)."""
    return len(scheduler._requests)


def take_snapshot(scheduler: Scheduler) -> tuple[State, list[EngineCoreRequest]]:
    """All that the decisions of a scheduler depend on, its cache and the arrivals of its requests apart.

    Equal snapshots mean equal decisions from now on. Copies, so that the scheduler can go on. O(requests and tokens).
    The arrivals, in the order of the state's `requests`, never change.

    Raises:
        ValueError: It has a source of drafts of its own, whose state is not known.
    """
    requests = scheduler._requests
    preemptor = scheduler._preemptor
    policy = preemptor._policy
    state = {
        "requests": [_request_state(request, requests) for request in requests.values()],
        "running": [request.request_id for request in scheduler.running.requests],
        "waiting": [request.request_id for request in scheduler.waiting.requests],
        "queue": _queue_state(scheduler.waiting),
        "under_way": [
            (step, start_s, num_left, [_name_if_live(request, requests) for request in rows])
            for step, (rows, start_s, num_left) in scheduler._steps_under_way.items()
        ],
        "removed": scheduler._removed_request_ids.copy(),
        "counts": [
            scheduler._num_arrivals, scheduler._step, scheduler._num_swapped, scheduler._num_protected,
            *scheduler._last_step, scheduler._stage_tokens,
        ],
        "preemptor": [
            preemptor.num_preemptions, preemptor.num_swaps, preemptor.num_swapped_out_blocks,
            preemptor.num_swapped_in_blocks, preemptor._end_s,
        ],
        "costs": [policy.token_s, policy.block_s] if isinstance(policy, CheapestPreemption) else [],
        "num_forks": scheduler._forking.num_forks,
        "forks": [(name, copies.copy()) for name, copies in scheduler._forking.request_id_to_copies.items()],
        "held": list(scheduler._forking.request_id_to_held.items()),
        "lookups": scheduler._lookups.state(),
        "drafting": _drafting_state(scheduler._drafting),
        "encoding": {} if scheduler._encoding is None else scheduler._encoding.state(),
        "pace": scheduler._chunks.state(),
        "turns": scheduler._chunks.turns.state() if scheduler._chunks.turns else [],
    }  # fmt: skip
    return state, [request.arrival for request in requests.values()]


def new_tokens(state: State) -> Iterator[list[int]]:
    """The tokens that each request of a snapshot has sampled since it arrived."""
    return (named[_TOKENS] for named in state["requests"])


def restore_snapshot(scheduler: Scheduler, state: State, arrivals: Sequence[EngineCoreRequest]) -> None:
    """Puts a new scheduler, built with the same configuration, into the state of a snapshot.

    The listener of states receives none that a request has entered before.

    Raises:
        ValueError: It is no snapshot of such a scheduler.
    """
    try:
        requests = scheduler._requests
        for arrival, named in zip(arrivals, state["requests"], strict=True):
            requests[arrival.request_id] = _restore_request(arrival, named)
            if arrival.media and scheduler._encoding is not None:
                scheduler._encoding.accept(requests[arrival.request_id], named[_NUMBERS])
        for request, named in zip(requests.values(), state["requests"], strict=True):
            request.parent = requests.get(named[2])
            request.on_status = scheduler._on_status
        scheduler.running.requests = [requests[name] for name in state["running"]]
        scheduler.waiting.requests = [requests[name] for name in state["waiting"]]
        _restore_queue(scheduler.waiting, state["queue"], requests.values())
        for step, start_s, num_left, names in state["under_way"]:
            rows = [requests[name] if name else _ended() for name in names]
            scheduler._steps_under_way[step] = StepUnderWay(rows, start_s, num_left)
        scheduler._removed_request_ids = list(state["removed"])
        counts = state["counts"]
        scheduler._num_arrivals, scheduler._step, scheduler._num_swapped, scheduler._num_protected = counts[:4]
        scheduler._last_step, scheduler._stage_tokens = (counts[4], counts[5], counts[6]), counts[7]
        _restore_parts(scheduler, state)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"it is no snapshot of a scheduler: {type(error).__name__}") from error


def _request_state(request: Request, requests: dict[str, Request]) -> tuple[Any, ...]:
    arrival, repetition, parent = request.arrival, request.repetition, request.parent
    num_known = len(arrival.prompt_token_ids) + len(arrival.output_token_ids)
    return (
        request.status.value,
        request.rank,
        # Of a parent that has ended nothing can be shared any more.
        "" if parent is None else _name_if_live(parent, requests),
        request.token_ids[num_known:],
        _counts_of(request),
        request.prompt_logprobs is not None,
        () if repetition is None else (repetition._num_seen, *repetition._runs),
        [number for number, _ in request.media],
    )


def _name_if_live(request: Request, requests: dict[str, Request]) -> str:
    return request.request_id if requests.get(request.request_id) is request else ""


def _restore_request(arrival: EngineCoreRequest, state: Sequence[Any]) -> Request:
    status, rank, _, token_ids, counts, has_logprobs, repetition, _ = state
    request = Request(arrival, tuple(rank), 0)
    request.status = RequestStatus(status)
    request.token_ids += token_ids
    for name, value in zip(_COUNTS, counts, strict=True):
        setattr(request, name, value)
    request.prompt_logprobs = [None] if has_logprobs else None
    if request.repetition is not None:
        request.repetition._num_seen, *request.repetition._runs = repetition
    return request


def _ended() -> Request:
    """Stands for a request that has ended since its row was scheduled: the row's results are dropped."""
    request = Request(EngineCoreRequest("", [0], SamplingParams()), (0,), 1)
    request.finish(RequestStatus.FINISHED_ABORTED)
    return request


def _queue_state(queue: WaitingQueue) -> list[Any]:
    state: list[Any] = [queue.num_tokens, queue.num_prefill_tokens, queue.num_admitted_tokens]
    if isinstance(queue, FairQueue):
        tenants = [
            (one.name, one.number, one.num_tokens, one.num_begun, one.deficit, one.round, one.turn or ())
            for one in queue._turns.tenants.values()
        ]
        state += [queue._turns.round, queue._turns.num_tenants, tenants]
    if isinstance(queue, DeadlineQueue):
        state.append(queue.num_missed)
    return state


def _restore_queue(queue: WaitingQueue, state: Sequence[Any], requests: Iterable[Request]) -> None:
    queue.num_tokens, queue.num_prefill_tokens, queue.num_admitted_tokens, *more = state
    queue.tenants = None
    if isinstance(queue, FairQueue):
        turns = queue._turns
        turns.round, turns.num_tenants, tenants, *more = more
        for name, number, num_tokens, num_begun, deficit, round_, turn in tenants:
            tenant = turns.tenants[name] = Tenant(name, number, round_)
            tenant.num_tokens, tenant.num_begun, tenant.deficit = num_tokens, num_begun, deficit
            if turn:
                tenant.turn = (turn[0], turn[1])
                turns.turns.append((turn[0], turn[1], tenant))
        turns.turns.sort(key=lambda one: one[:2])
        for request in queue.requests:  # by rank, so that each of these is by rank too
            turns.tenants[request.arrival.tenant].waiting.append(request)
            if request.num_paid_tokens:
                queue._begun.append(request)
                turns.tenants[request.arrival.tenant].num_paused += 1
    if isinstance(queue, DeadlineQueue):
        (queue.num_missed,) = more
        queue._with_deadlines = [request for request in queue.requests if _can_lose_deadline(request)]


def _drafting_state(drafting: Drafting) -> list[Any]:
    source, lengths = drafting._source, drafting._lengths
    if source is not None and not isinstance(source, NgramDrafts | SuffixDrafts | ModelDrafts):
        raise ValueError(f"there are no snapshots of a {type(source).__name__}")
    # The indices follow from requests' tokens, as far as these are indexed. Of a draft model the runner knows.
    indexed: list[tuple[str, int]] = []
    if isinstance(source, NgramDrafts):
        indexed = [(name, index.num_tokens) for name, index in source._indices.items()]
    elif isinstance(source, SuffixDrafts):
        indexed = [(name, index.end) for name, index in source._indices.items()]
    answers = list(source.answers) if isinstance(source, SuffixDrafts) else []
    rates = [
        (name, rate.num_tried, rate.num_right, rate._num_steps_without)
        for name, rate in (lengths._rates.items() if lengths is not None else ())
    ]
    return [drafting.num_drafts, drafting.num_draft_tokens, drafting.num_accepted.copy(), indexed, rates, answers]


def _restore_parts(scheduler: Scheduler, state: State) -> None:
    if scheduler._encoding is not None:
        scheduler._encoding.restore(state["encoding"])
    scheduler._chunks.restore(state["pace"], state.get("turns", ()))
    scheduler._lookups.restore(state["lookups"], scheduler._requests)
    preemptor, forking, drafting = scheduler._preemptor, scheduler._forking, scheduler._drafting
    (
        preemptor.num_preemptions, preemptor.num_swaps, preemptor.num_swapped_out_blocks,
        preemptor.num_swapped_in_blocks, preemptor._end_s,
    ) = state["preemptor"]  # fmt: skip
    policy = preemptor._policy
    if isinstance(policy, CheapestPreemption):
        policy.token_s, policy.block_s = state["costs"]
    forking.num_forks = state["num_forks"]
    forking.request_id_to_copies = {name: [(a, b) for a, b in copies] for name, copies in state["forks"]}
    forking.request_id_to_held = dict(state["held"])
    drafting.num_drafts, drafting.num_draft_tokens, num_accepted, indexed, rates, answers = state["drafting"]
    drafting.num_accepted = list(num_accepted)
    source, lengths = drafting._source, drafting._lengths
    if isinstance(source, NgramDrafts):
        for name, num_tokens in indexed:
            index = source._indices[name] = _NgramIndex(source._lengths)
            index.advance(scheduler._requests[name].token_ids[:num_tokens])
            source.num_indexed_tokens += num_tokens
    elif isinstance(source, SuffixDrafts):
        for name, num_tokens in indexed:
            source._own_index(name, scheduler._requests[name].token_ids[:num_tokens])
        for (tenant, salt), token_ids in answers:
            source.answers.add((tenant, salt), token_ids)
    if lengths is not None:
        for name, num_tried, num_right, num_without in rates:
            rate = lengths._rates[name] = AcceptanceRate(lengths._prior)
            rate.num_tried, rate.num_right, rate._num_steps_without = num_tried, num_right, num_without
