"""Declaration of `EngineCoreOutputs`.

The outputs of a step are columns, most of them sparse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from random import Random
from typing import Any, Final

from llmstack_engine_core.messages import kinds
from llmstack_engine_core.messages.kinds import FLOATS, UINT32S, CodecError, Kind, optional, sparse
from llmstack_engine_core.messages.requests import KV_TRANSFER, MAX_REQUEST_ID_LENGTH, MAX_TENANT_LENGTH
from llmstack_engine_core.messages.rows import row
from llmstack_types import (
    BlockEviction,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    RequestEvent,
    RequestStatus,
    SchedulerStats,
    ShadowFigures,
    ShadowReport,
    StepPhases,
    TokenLogprobs,
)

MAX_STATS_COUNTERS: Final = 1024
_MAX_FIGURE: Final = 1e18
_FLOAT_SIZE: Final = 4


def _check_stats(stats: SchedulerStats) -> None:
    if len(stats.waiting_tenants) != len(stats.num_waiting_tokens_per_tenant):
        raise CodecError("waiting_tenants must hold one name for each number")


STATS: Final = row(
    SchedulerStats,
    {
        "num_accepted_draft_tokens_per_place": kinds.counters(MAX_STATS_COUNTERS),
        "num_waiting_tokens_per_tenant": kinds.counters(MAX_STATS_COUNTERS),
        "waiting_tenants": kinds.texts(MAX_TENANT_LENGTH, MAX_STATS_COUNTERS, make=tuple),
    },
    check=_check_stats,
)

PHASES: Final = row(StepPhases, dict.fromkeys(StepPhases._fields, kinds.number()))

REQUEST_IDS: Final = kinds.texts(MAX_REQUEST_ID_LENGTH, low=1)

EVENTS: Final = kinds.columns(
    RequestEvent, {"request_id": REQUEST_IDS, "status": kinds.codes(RequestStatus), "time_s": FLOATS}, tuple
)

_EVICTIONS: Final = kinds.columns(
    BlockEviction, {"lifetime_s": FLOATS, "idle_s": FLOATS, "reuse_gaps_s": kinds.lists(FLOATS, make=tuple)}, tuple
)


def _unpack_figure(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 <= value < _MAX_FIGURE:
        raise CodecError(f"{name} must be a number of at least 0")
    return value  # type: ignore[no-any-return]  # one of the two


_FIGURE: Final = Kind(_unpack_figure, lambda pick: pick.choice((0, 1, 0.5, 1e9)))
_FIGURES: Final = row(ShadowFigures, dict.fromkeys(ShadowFigures._fields, _FIGURE))
SHADOW: Final = row(
    ShadowReport,
    dict.fromkeys(("name", "problem"), kinds.shortened(512))
    | dict.fromkeys(("num_requests", "num_shed", "lag_s", "cpu_s", "num_recent"), _FIGURE)
    | dict.fromkeys(
        ("real", "unchanged", "shadow", "recent_real", "recent_unchanged", "recent_shadow"), _FIGURES
    ),
)  # fmt: skip


def _pack_logprobs(entries: Sequence[TokenLogprobs | None], name: str) -> list[bytes]:
    present = [entry for entry in entries if entry is not None]
    counts = [0 if entry is None else len(entry.token_ids) for entry in entries]
    if len(entries) - counts.count(0) != len(present):
        raise CodecError("token_ids of log-probabilities must not be empty")
    if any(len(entry.logprobs) != len(entry.token_ids) for entry in present):
        raise CodecError("token_ids and logprobs must be of one length")
    return [
        UINT32S.pack(counts, name),
        UINT32S.pack(chain.from_iterable(entry.token_ids for entry in present), name),
        FLOATS.pack(chain.from_iterable(entry.logprobs for entry in present), name),
        UINT32S.pack([entry.rank for entry in present], name),
    ]


def _logprobs(has_gaps: bool) -> Kind:
    """Log-probabilities of one request; with gaps, a position may have none."""

    def unpack(value: Any, name: str) -> list[TokenLogprobs | None]:
        packed_counts, packed_ids, packed_logprobs, packed_ranks = kinds.list_of(value, name, 4)
        counts = UINT32S.unpack(packed_counts, name)
        if not has_gaps and 0 in counts:
            raise CodecError(f"{name} must hold an entry for each token")
        token_ids = UINT32S.unpack(packed_ids, name, sum(counts))
        logprobs = FLOATS.unpack(packed_logprobs, name, len(token_ids))
        ranks = iter(UINT32S.unpack(packed_ranks, name, len(counts) - counts.count(0)))
        return [
            TokenLogprobs(tuple(token_ids[end - count : end]), tuple(logprobs[end - count : end]), next(ranks))
            if count
            else None
            for count, end in zip(counts, accumulate(counts), strict=True)
        ]

    return kinds.items(Kind(unpack, _draw_logprobs(has_gaps), _pack_logprobs))


def _draw_logprobs(has_gaps: bool) -> Callable[[Random], list[TokenLogprobs | None]]:
    one = TokenLogprobs((2**32 - 1, 7), (-0.5, -1.5), 3)
    return lambda pick: [None if has_gaps and pick.random() < 0.3 else one for _ in range(pick.randrange(3))]


OUTPUTS: Final = row(
    EngineCoreOutputs,
    {
        "outputs": kinds.columns(
            EngineCoreOutput,
            {
                "request_id": REQUEST_IDS,
                "new_token_ids": kinds.lists(UINT32S),
                "logprobs": sparse(None, _logprobs(has_gaps=False)),
                "prompt_logprobs": sparse(None, _logprobs(has_gaps=True)),
                "finish_reason": sparse(None, kinds.codes(FinishReason)),
                "stop_reason": sparse(None, UINT32S),
                "num_cached_tokens": sparse(-1, UINT32S),
                "error": sparse(None, kinds.texts(4096)),
                "pooled": sparse(None, kinds.items(kinds.blob(_FLOAT_SIZE))),
                "kv_transfer": sparse(None, kinds.items(KV_TRANSFER)),
            },
        ),
        "timestamp_s": kinds.number(),
        "scheduler_stats": optional(STATS),
        "events": EVENTS,
        "phases": optional(PHASES),
        "evictions": _EVICTIONS,
        "shadow": optional(SHADOW),
    },
    absent=("engine_index", "engine"),  # a client's own
)
