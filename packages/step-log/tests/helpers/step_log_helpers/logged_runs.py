"""Logged runs of a control plane without a model, from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llmstack_core_scheduler import SchedulerConfig
from llmstack_step_log import FileSink, LoggedScheduler, LogHeader, StepLog, make_marker, read_step_log
from llmstack_step_log.control_plane import CacheConfig, build_scheduler
from llmstack_step_log.decisions import UPDATED, unpack_decision, updated_rows
from llmstack_step_log.replay.against import decisions_as_recorded
from llmstack_types import (
    EngineCoreRequest,
    InvalidRequestError,
    MediaItem,
    MediaMemory,
    ModelRunnerOutput,
    PrefixMedia,
    RepetitionDetectionParams,
    SamplingParams,
    SchedulerOutput,
)

PREFIX = [1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]


class LoggedRun:
    """A scheduler that is fed with random calls, while its log is written to a file."""

    def __init__(
        self, path: Path, scheduler: SchedulerConfig, cache: CacheConfig, seed: int = 0, *,
        snapshot_steps: int = 8, is_waited_for: bool = True,
    ) -> None:  # fmt: skip
        """`is_waited_for`: Every snapshot is encoded before the next step, so that none is left out."""
        header = LogHeader.of(scheduler, cache, {}, make_marker() if snapshot_steps else b"")
        self._media = scheduler.media
        self.log = StepLog(header, FileSink(str(path)), snapshot_steps=snapshot_steps)
        self.scheduler = LoggedScheduler(build_scheduler(scheduler, cache), self.log)
        self.rng = random.Random(seed)
        self.now_s = 100.0
        self.num_requests = 0
        self._is_waited_for = is_waited_for
        self._known: dict[str, int] = {}
        self._under_way: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []

    def do_something(self, num_under_way: int) -> None:
        """Arrivals, forks, aborts, resets or imports, then a step; at most `num_under_way` of these overlap."""
        rng = self.rng
        if rng.random() < 0.5:
            self.add()
        if rng.random() < 0.1 and self._known:
            parent = rng.choice(list(self._known))
            self._try(lambda: self.scheduler.fork_request(parent, self.request([*PREFIX[:6], rng.randrange(9)])))
        if rng.random() < 0.1:
            self.scheduler.abort_requests([f"r{rng.randrange(self.num_requests + 1)}"])
        if rng.random() < 0.05:
            self.scheduler.reset_prefix_cache()
        if rng.random() < 0.1:
            token_ids, salt = PREFIX[: rng.randint(2, 16)], rng.choice(["", "salt"])
            items = () if self._media is None else self._items(len(PREFIX[:16]))
            self.scheduler.import_prefix(token_ids, salt, PrefixMedia(salt, items))
        if rng.random() < 0.1:
            self.scheduler.cached_prefix(PREFIX[: rng.randint(2, 16)])  # it is not logged, and decides nothing
        self.step(num_under_way)

    def add(self) -> None:
        """A request that shares the beginning of its prompt with others."""
        rng = self.rng
        prompt = PREFIX[: rng.randint(1, 16)] + [rng.randrange(20) for _ in range(rng.randint(0, 12))]
        fork_of = rng.choice([*self._known, ""]) if rng.random() < 0.2 else ""
        self._try(lambda: self.scheduler.add_request(self.request(prompt, fork_of)))

    def request(self, prompt: list[int], fork_of: str = "") -> EngineCoreRequest:
        """The next request."""
        rng = self.rng
        self.num_requests += 1
        detection = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=4)
        params = SamplingParams(
            max_tokens=rng.choice([1, 4, 16, 30]), seed=0, stop_token_ids=[rng.randrange(40)],
            prompt_logprobs=0 if rng.random() < 0.1 else None,
            repetition_detection=detection if rng.random() < 0.2 else None,
        )  # fmt: skip
        return EngineCoreRequest(
            f"r{self.num_requests}", prompt, params, arrival_time_s=self.now_s, priority=rng.randrange(3),
            cache_salt=rng.choice(["", "", "salt"]), lora_name=rng.choice([None, None, "one", "two"]),
            fork_of=fork_of, tenant=f"t{rng.randrange(3)}",
            deadline_s=self.now_s + rng.random() / 10 if rng.random() < 0.5 else None,
            media=() if self._media is None or fork_of else self._items(len(prompt)),
        )  # fmt: skip

    def _items(self, num_tokens: int) -> tuple[MediaItem, ...]:
        """Up to two items of few kinds, some of them equal; the last token is never one of theirs."""
        rng, items, place = self.rng, list[MediaItem](), 0
        while rng.random() < 0.6 and place + 7 < num_tokens:
            place += rng.randrange(3)
            memory = MediaMemory(7, data=b"private")
            item = MediaItem(
                bytes([rng.randrange(4)]) * 32, "image", place, 4, layout=(2, 2), num_units=30, memory=memory
            )
            items.append(item if rng.random() < 0.7 else replace(item, embed_runs=((0, 1), (2, 2))))
            place = item.end
        return tuple(items)

    def step(self, num_under_way: int = 1) -> None:
        """Schedules a step, and applies the oldest one's results where `num_under_way` are."""
        self.now_s += self.rng.random() / 100
        scheduled = self.scheduler.schedule(self.now_s)
        if self._is_waited_for and self.log._snapshots is not None and self.log._snapshots._pending is not None:
            wait([self.log._snapshots._pending])
        self._under_way.append((scheduled, self._sample(scheduled)))
        while len(self._under_way) >= num_under_way:
            self.now_s += self.rng.random() / 100
            self.scheduler.update_from_output(*self._under_way.pop(0), self.now_s)
            self.scheduler.has_unfinished_requests()

    def finish(self) -> None:
        """Applies what is under way, and closes the log."""
        while self._under_way:
            self.scheduler.update_from_output(*self._under_way.pop(0), self.now_s)
        self.log.close()

    def _sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in scheduled.removed_request_ids:
            self._known.pop(request_id, None)
        for request in scheduled.new_requests:
            self._known[request.request_id] = len(request.token_ids)
        rows = scheduled.scheduled_requests
        sampled, errors = [], {}
        for name, computed, num_scheduled, _, drafts in rows:
            is_last = computed + num_scheduled - len(drafts) == self._known[name]
            count = self.rng.randint(1, len(drafts) + 1) if is_last else 0
            sampled.append([*list(drafts)[: count - 1], self.rng.randrange(5)] if count else [])
            self._known[name] += count
            if self.rng.random() < 0.005:
                errors[name] = "broken"
        return ModelRunnerOutput([row.request_id for row in rows], sampled, errors=errors)

    def _try(self, call: Callable[[], object]) -> None:
        with suppress(InvalidRequestError):
            call()


def write_long_log(path: Path, scheduler: SchedulerConfig, cache: CacheConfig) -> None:
    """Requests that come and end in a log of some 60 snapshots."""
    run = LoggedRun(path, scheduler, cache, 5, snapshot_steps=16)
    for _ in range(1000):
        run.do_something(1)
    run.finish()


def ended_requests(path: Path) -> list[str]:
    """Those with a row that came to their ends."""
    seen: dict[str, None] = {}
    for decision in decisions_as_recorded(read_step_log(path)):
        kind, decided = unpack_decision(decision.packed)
        if kind == UPDATED:
            rows = updated_rows(decided)
            seen.update((name, None) for name, row in rows.items() if row.get("finish_reason") == "length")
    return list(seen)
