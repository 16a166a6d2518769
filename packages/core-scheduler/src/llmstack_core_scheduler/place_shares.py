"""Shares of places: which rows make room for waiting requests of other tenants.

The share of a tenant is the number of places by the number of tenants with running or waiting requests, and at least
one. Where all places are taken, a tenant with more than its share yields some of them to waiting requests of tenants
with less: its newest rows, at most one row in eight in a step, and none that has no token yet. A single tenant has all
places.

A row that yields lets a tenant come nearer to its share, and none goes beyond it by that. So the rows come to rest, as
soon as no tenant with less than its share waits. The oldest row of a tenant is never taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from llmstack_core_scheduler.adapter_places import AdapterPlaces
from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_core_scheduler.waiting_queue import AdmissionOrder, WaitingQueue

ROWS_PER_YIELD = 8
"""One of so many rows may yield its place in a step, so that the steps of a key do not shrink at once."""


def admission_order(waiting: WaitingQueue, num_places: int, num_running: int, now_s: float) -> AdmissionOrder:
    """The order in which requests are admitted: where they are more than the places, by the shares of these first."""
    are_short = num_running + len(waiting) > num_places
    return waiting.order(now_s, waiting.share_of_places(num_places) if are_short else 0)


def rows_to_yield(
    waiting: WaitingQueue,
    running: Sequence[Request],
    plan: StepPlan,
    config: SchedulerConfig,
    now_s: float,
    waits_for_progress: Callable[[Request, StepPlan], bool],
) -> list[Request]:
    """The rows that yield their places in a step that begins at `now_s`, the newest first. All places are taken.

    `waits_for_progress` says whether a waiting request could not use a place in this step.
    """
    share = waiting.share_of_places(len(running))
    victims = _beyond_share(waiting, running, share)
    if not share or (victim := next(victims, None)) is None:
        return []
    chosen: list[Request] = []
    max_num_rows, room = max(len(running) // ROWS_PER_YIELD, 1), _PrefillRoom(running, plan.budget, config)
    for request in _below_share(waiting, share, now_s):
        if not _has_place_for_adapter(request, running, config) or waits_for_progress(request, plan):
            continue  # another one may go before it
        if victim is None or len(chosen) == max_num_rows or not room.take(request):
            break
        chosen.append(victim)
        victim = next(victims, None)
    return chosen


def _below_share(waiting: WaitingQueue, share: int, now_s: float) -> Iterator[Request]:
    """The waiting requests that their tenants' shares have places for, in the order of admission."""
    tenant_to_num_places: Counter[str] = Counter()
    order = waiting.order(now_s, share)
    while (request := order.next()) is not None:
        tenant = request.arrival.tenant
        num_running = waiting.num_running_of(tenant)
        if num_running >= share:
            return  # those of such tenants are the last
        order.skip(request)
        if num_running + tenant_to_num_places[tenant] < share:
            tenant_to_num_places[tenant] += 1
            yield request


def _beyond_share(waiting: WaitingQueue, running: Sequence[Request], share: int) -> Iterator[Request]:
    """The newest rows of each tenant, as many as it has beyond its share, but none without a token.

    Its oldest row stays too, so that the oldest request of a tenant always advances, and none waits for ever.
    """
    tenant_to_num_older: dict[str, int] = {}
    tenant_to_num_beyond: dict[str, int] = {}
    for request in reversed(running):
        tenant = request.arrival.tenant
        if tenant not in tenant_to_num_older:
            tenant_to_num_older[tenant] = num_running = waiting.num_running_of(tenant)
            tenant_to_num_beyond[tenant] = num_running - share
        tenant_to_num_older[tenant] -= 1
        has_token = len(request.token_ids) > request.num_prompt_tokens
        if has_token and tenant_to_num_older[tenant] and tenant_to_num_beyond[tenant] > 0:
            tenant_to_num_beyond[tenant] -= 1
            yield request


def _has_place_for_adapter(request: Request, running: Sequence[Request], config: SchedulerConfig) -> bool:
    return AdapterPlaces(running, config.max_loras).has_room(request)


class _PrefillRoom:
    """The room of a step beside its rows. A place for a request that does not fit into it would stay empty."""

    def __init__(self, running: Sequence[Request], budget: int, config: SchedulerConfig) -> None:
        most = config.max_num_row_tokens
        lengths = [max(min(one.num_tokens - one.num_computed_tokens, most), 1) for one in running]
        self._num_prefills = sum(length > 1 for length in lengths)
        self._max_num_prefills = config.max_num_partial_prefills or len(running) + 1
        self._num_others = sum(lengths) - len(running)
        self._max_num_tokens = budget - len(running)
        self._max_num_prefill_tokens = config.max_prefill_tokens or budget
        self._can_cut = config.enable_chunked_prefill

    def take(self, request: Request) -> bool:
        """Takes what the request needs of it; False, where it would have to wait."""
        num_missing = request.num_tokens - request.num_computed_tokens
        num_tokens = min(num_missing, self._max_num_tokens - self._num_others)
        if num_tokens < (1 if self._can_cut else num_missing):
            return False
        if num_missing > 1 and self._num_prefills >= self._max_num_prefills:
            return False
        if self._num_others and self._num_others + num_tokens > self._max_num_prefill_tokens:
            return False
        self._num_others += num_tokens
        self._num_prefills += num_tokens < num_missing
        return True
