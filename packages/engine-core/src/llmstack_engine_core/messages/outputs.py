"""Declaration of `EngineCoreOutputs`.

The outputs of a step are columns, most of them sparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Final

from llmstack_engine_core.messages import kinds
from llmstack_engine_core.messages.kinds import FLOATS, UINT32S, CodecError, Kind, optional, sparse
from llmstack_engine_core.messages.media import ENCODER_STATS
from llmstack_engine_core.messages.requests import KV_TRANSFER, MAX_REQUEST_ID_LENGTH, MAX_TENANT_LENGTH
from llmstack_engine_core.messages.rows import row
from llmstack_types import (
    BlockEviction,
    DiskCacheStats,
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


DISK_STATS: Final = row(DiskCacheStats, {"num_misses": kinds.counters(MAX_STATS_COUNTERS)})
STATS: Final = row(
    SchedulerStats,
    {
        "num_accepted_draft_tokens_per_place": kinds.counters(MAX_STATS_COUNTERS),
        "num_waiting_tokens_per_tenant": kinds.counters(MAX_STATS_COUNTERS),
        "num_computed_tokens_per_cause": kinds.counters(MAX_STATS_COUNTERS),
        "waiting_tenants": kinds.texts(MAX_TENANT_LENGTH, MAX_STATS_COUNTERS, make=tuple),
        "encoder": optional(ENCODER_STATS),
        "disk": optional(DISK_STATS),
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


_GAP: Final = TokenLogprobs((), (), 0)
_LOGPROBS: Final = kinds.columns(
    TokenLogprobs,
    {
        "token_ids": kinds.lists(UINT32S, make=tuple), "logprobs": kinds.lists(FLOATS, make=tuple), "rank": UINT32S,
    },
)  # fmt: skip


def _logprobs(has_gaps: bool) -> Kind:
    """Log-probabilities by position; with gaps, a position may have none."""

    def pack(entries: Sequence[TokenLogprobs | None], name: str) -> Any:
        if not all(one is None or 0 < len(one.token_ids) == len(one.logprobs) for one in entries):
            raise CodecError(f"{name} must hold as many token_ids as logprobs, and some of them")
        return _LOGPROBS.pack([one or _GAP for one in entries], name)

    def unpack(value: object, name: str, length: int | None = None) -> list[TokenLogprobs | None]:
        entries = _LOGPROBS.unpack(value, name, length)
        if not all((one.token_ids or has_gaps) and len(one.token_ids) == len(one.logprobs) for one in entries):
            raise CodecError(f"{name} must hold as many token_ids as logprobs, and some for each token")
        return [one if one.token_ids else None for one in entries]

    def draw(pick: Random, length: int) -> list[TokenLogprobs | None]:
        one = TokenLogprobs((2**32 - 1, 7), (-0.5, -1.5), 3)
        return [None if has_gaps and pick.random() < 0.3 else one for _ in range(length)]

    return kinds.lists(Kind(unpack, draw, pack))


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
                "num_disk_tokens": sparse(0, UINT32S),
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
