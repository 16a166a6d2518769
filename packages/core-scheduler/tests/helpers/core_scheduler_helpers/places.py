"""What must hold of the rows that yield their places in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from llmstack_core_scheduler.fair_queue import FairQueue
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.scheduler import Scheduler
from llmstack_types import RequestStatus


class Places(NamedTuple):
    """Who ran and who waited before a step.

    Attributes:
        running: The requests that ran, by rank.
        has_token: Those of them with a token.
        num_waiting: Waiting requests by tenant.
        max_num_rows: All places.
    """

    running: list[Request]
    has_token: set[str]
    num_waiting: Counter[str]
    max_num_rows: int

    @classmethod
    def before(cls, scheduler: Scheduler, max_num_rows: int) -> Places:
        running = scheduler.running.requests.copy()
        has_token = {one.request_id for one in running if len(one.token_ids) > one.num_prompt_tokens}
        return cls(running, has_token, Counter(one.arrival.tenant for one in scheduler.waiting), max_num_rows)

    def broken_rule(self, yielded: list[str]) -> str:
        """The rule that these requests, which yielded in the step, do not keep; empty where all are kept."""
        if not yielded:
            return ""
        counts = Counter(one.arrival.tenant for one in self.running)
        num_keys = len(counts.keys() | self.num_waiting.keys())
        share = max(self.max_num_rows / num_keys, 1)
        for place, request in enumerate(self.running):
            if request.request_id in yielded:
                name = request.arrival.tenant
                if request.request_id not in self.has_token:
                    return "a row with its first token still to come never yields"
                if not any(one.arrival.tenant == name for one in self.running[:place]):
                    return "the oldest row of a key never yields"
                newer = {one.request_id for one in self.running[place:] if one.arrival.tenant == name}
                if not newer & self.has_token <= set(yielded):
                    return "the newest rows yield first"
        by_tenant = Counter(one.arrival.tenant for one in self.running if one.request_id in yielded)
        num_left = [counts[name] - number for name, number in by_tenant.items()]
        can_receive = sum(
            min(number, int(share) - counts[name]) for name, number in self.num_waiting.items() if counts[name] < share
        )
        rules = {
            "a key alone is never limited": num_keys > 1,
            "only running rows yield, each once": sum(by_tenant.values()) == len(yielded) == len(set(yielded)),
            "rows yield only where all places are taken": len(self.running) == self.max_num_rows,
            "one row in eight yields at most": len(yielded) <= max(self.max_num_rows / 8, 1),
            "a key yields only what is over its share": min(num_left) >= int(share),
            "a key at or under its share never yields": all(counts[one] > share for one in by_tenant),
            "rows yield only to waiting requests of keys under their share": len(yielded) <= can_receive,
        }  # fmt: skip
        return next((rule for rule, is_kept in rules.items() if not is_kept), "")


def wrong_counts(scheduler: Scheduler) -> bool:
    """Whether the queue counts the rows of some tenant wrongly."""
    queue = scheduler.waiting
    if not isinstance(queue, FairQueue):
        return False
    counts = Counter(one.arrival.tenant for one in scheduler.running)
    names = counts.keys() | {one.arrival.tenant for one in queue}
    return any(queue.num_running_of(name) != counts[name] for name in names) or bool(
        queue.share_of_places(1000) != (max(1000 // len(names), 1) if len(names) > 1 else 0)
    )


class Yields:
    """A listener of states that keeps the requests that yielded in the step under way."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []

    def __call__(self, request_id: str, status: RequestStatus) -> None:
        if status is RequestStatus.YIELDED:
            self.request_ids.append(request_id)

    def take(self) -> list[str]:
        """Those since the last call."""
        taken, self.request_ids = self.request_ids, []
        return taken


def all_advance(scheduler: Scheduler, row_ids: Sequence[str], waiting: Collection[str] = ()) -> bool:
    """Whether each running request has a row of the step, but those of `waiting`.

    With a limit of a step's time, a prompt may have none: a stream and another prompt have left no time for it.
    """
    running = {request.request_id: request for request in scheduler.running}
    left = [running[name] for name in running.keys() - {*row_ids} - {*waiting}]
    if not {*row_ids} <= running.keys():
        return False
    has_limit = scheduler._config.max_itl_steps > 0
    are_prompts = all(request.num_tokens - request.num_computed_tokens > 1 for request in left)
    return not left or (has_limit and are_prompts and bool(row_ids))
