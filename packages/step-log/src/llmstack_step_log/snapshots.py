"""Snapshots of the control plane, from which a replay can begin."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from llmstack_core_scheduler import Scheduler as OwnScheduler
from llmstack_core_scheduler import snapshot as of_scheduler
from llmstack_core_scheduler.request import StatusListener
from llmstack_kv_cache import KVCacheManager
from llmstack_kv_cache import snapshot as of_cache
from llmstack_step_log.control_plane import build_cache, build_scheduler
from llmstack_step_log.decisions import DIGEST_SIZE
from llmstack_step_log.errors import StepLogError
from llmstack_step_log.header import MARKER_SIZE, LogHeader
from llmstack_step_log.packing import pack, unpack
from llmstack_step_log.primitives import MICROSECONDS, Cursor, put_int, put_uint
from llmstack_step_log.request_fields import pack_request, unpack_request
from llmstack_types import EngineCoreRequest, ScheduledRequest, SchedulerOutput

# The limits bound what the step thread copies: a larger state has no snapshot, and a replay begins further back.
MAX_REQUESTS: Final = 8192
MAX_NUMBERS: Final = 1 << 24
MAX_STATE_BYTES: Final = 1 << 28
# In the thread of the log's writer. Token ids compress to a third; a higher level takes three times as long.
_LEVEL: Final = 1
_RUNS: Final = "runs"
_RUNS_PER_PART: Final = 512

StepsUnderWay = Mapping[int, SchedulerOutput]
"""Steps that are scheduled and not updated, by number."""


class State(NamedTuple):
    """A control plane at one moment, as plain data; only `arrivals` are objects, which never change."""

    scheduler: dict[str, Any]
    cache: dict[str, Any]
    under_way: list[Any]
    arrivals: list[EngineCoreRequest]


@dataclass(frozen=True, slots=True)
class Place:
    """The facts about a snapshot that need not decode its state.

    Attributes:
        num_steps: Steps scheduled before it.
        last_us: The time of the last event before it.
        digest: The running hash of the decisions before it.
        state_digest: The hash of its state.
    """

    num_steps: int
    last_us: int
    digest: bytes
    state_digest: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of the control plane that a replay can begin with."""

    place: Place
    state: State

    def build_scheduler(self, header: LogHeader, on_status: StatusListener | None = None) -> OwnScheduler:
        """A scheduler in this state, over a cache in this state; `on_status` gets the states of requests from now on.

        Raises:
            StepLogError: The state is not one of these packages, or damaged.
        """
        scheduler, config = header.configs()
        try:
            cache = build_cache(config)
            of_cache.restore_snapshot(cache, self.state.cache)
            made = build_scheduler(scheduler, config, on_status, cache)
            of_scheduler.restore_snapshot(made, self.state.scheduler, self.state.arrivals)
            digest = state_digest(take_state(made, self.steps_under_way()))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise StepLogError(
                f"the snapshot at step {self.place.num_steps} cannot be restored: {str(error)[:200]}; it was made by "
                f"{header.made_by}"
            ) from error
        if digest != self.place.state_digest:
            raise StepLogError(f"the snapshot at step {self.place.num_steps} is not what was recorded")
        return made

    @property
    def now_s(self) -> float:
        """The time of the last event before it."""
        return self.place.last_us / MICROSECONDS

    def live_requests(self) -> Iterator[EngineCoreRequest]:
        """The requests that had come and not ended, with the tokens that they had got, by arrival."""
        for arrival, token_ids in zip(self.state.arrivals, of_scheduler.new_tokens(self.state.scheduler), strict=True):
            yield replace(arrival, output_token_ids=(*arrival.output_token_ids, *token_ids))

    def steps_under_way(self) -> dict[int, SchedulerOutput]:
        """The steps whose results come after it, as far as their results need them."""
        return {
            step: SchedulerOutput(
                step,
                scheduled_requests=[
                    ScheduledRequest(name, computed, scheduled, [], drafts)
                    for name, computed, scheduled, drafts in rows
                ],
                total_num_scheduled_tokens=num_tokens,
                swap_outs=[(0, 0)] * num_swap_outs,
                swap_ins=[(0, 0)] * num_swap_ins,
            )
            for step, num_tokens, num_swap_outs, num_swap_ins, rows in self.state.under_way
        }


def take_state(scheduler: object, under_way: StepsUnderWay) -> State:
    """The state of a scheduler and its cache. O(requests, tokens and blocks).

    Raises:
        ValueError: They are not of these packages, or their state exceeds a limit.
    """
    if not isinstance(scheduler, OwnScheduler) or not isinstance(scheduler.kv_cache_manager, KVCacheManager):
        raise ValueError("there are snapshots of this package's scheduler and caches only")
    cache = scheduler.kv_cache_manager
    num_numbers = of_cache.num_snapshot_items(cache)
    num_requests = of_scheduler.num_snapshot_requests(scheduler)
    if num_requests > MAX_REQUESTS or num_numbers > MAX_NUMBERS:
        raise ValueError(
            f"the state has {num_requests} requests and {num_numbers} numbers in the cache, and a snapshot holds at "
            f"most {MAX_REQUESTS} and {MAX_NUMBERS}"
        )
    state, arrivals = of_scheduler.take_snapshot(scheduler)
    steps = [
        (
            one.step, one.total_num_scheduled_tokens, len(one.swap_outs), len(one.swap_ins),
            [(name, computed, scheduled, list(drafts)) for name, computed, scheduled, _, drafts in
             one.scheduled_requests],
        )
        for one in under_way.values()
    ]  # fmt: skip
    return State(state, of_cache.take_snapshot(cache), steps, arrivals)


def _packed_parts(state: State) -> list[bytes]:
    """The state in pieces: the engine core's thread waits while one is being packed."""
    rest = {name: value for name, value in state.cache.items() if name != _RUNS}
    runs = state.cache[_RUNS]
    chunks = [pack(runs[start : start + _RUNS_PER_PART]) for start in range(0, len(runs), _RUNS_PER_PART)]
    return [pack(state.scheduler), pack(state.under_way), pack(rest), *chunks]


def _digest_of(parts: Sequence[bytes]) -> bytes:
    digest = blake2b(digest_size=DIGEST_SIZE)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def state_digest(state: State) -> bytes:
    """The hash of a state: equal hashes mean equal states."""
    return _digest_of(_packed_parts(state))


def encode_snapshot(marker: bytes, num_steps: int, last_us: int, digest: bytes, state: State) -> bytes:
    """Payload of a snapshot."""
    parts = _packed_parts(state)
    payload = bytearray(marker)
    put_uint(payload, num_steps)
    put_int(payload, last_us)
    payload += digest + _digest_of(parts)
    body = pack([parts, [pack_request(arrival) for arrival in state.arrivals]])
    return bytes(payload + zlib.compress(body, _LEVEL))


def read_place(payload: bytes) -> tuple[Place, int]:
    """The facts about a snapshot in its payload, and where its state begins.

    Raises:
        StepLogError: It is none.
    """
    cursor = Cursor(payload, MARKER_SIZE)
    place = Place(cursor.take_uint(), cursor.take_int(), cursor.take(DIGEST_SIZE), cursor.take(DIGEST_SIZE))
    return place, cursor.position


def read_snapshot(payload: bytes) -> Snapshot:
    """The inverse of `encode_snapshot`.

    Raises:
        StepLogError: It is damaged.
    """
    place, start = read_place(payload)
    inflate = zlib.decompressobj()
    try:
        body = inflate.decompress(payload[start:], MAX_STATE_BYTES)
    except zlib.error as error:
        raise StepLogError("a snapshot is damaged") from error
    if not inflate.eof:
        raise StepLogError("a snapshot is damaged, or too large")
    try:
        parts, arrivals = unpack(body, list)
        if _digest_of(parts) != place.state_digest:
            raise StepLogError("a snapshot is damaged")
        scheduler, under_way, cache = unpack(parts[0], dict), unpack(parts[1], list), unpack(parts[2], dict)
        cache[_RUNS] = [run for part in parts[3:] for run in unpack(part, list)]
        return Snapshot(place, State(scheduler, cache, under_way, [unpack_request(part) for part in arrivals]))
    except (TypeError, ValueError, IndexError) as error:
        raise StepLogError("a snapshot is damaged") from error
