"""The `metrics` object that `--enable-per-request-metrics` adds to answers: vLLM's fields, in milliseconds."""

from __future__ import annotations

from llmstack_server.protocols import Timings


def timings_object(timings: Timings | None) -> dict[str, float | None]:
    """How long the parts of one completion took; null for what is not known, such as a mean over no intervals.

    `time_to_first_token_ms` counts from the request's arrival, so `queue_time_ms` is a part of it.
    """
    if timings is None:
        return dict.fromkeys(
            ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")
        )
    first_s, last_s, num_tokens = timings.first_token_time_s, timings.last_token_time_s, timings.num_generation_tokens
    generation_ms, inference_ms = _ms(first_s, last_s), _ms(timings.scheduled_time_s, last_s)
    return {
        "time_to_first_token_ms": _ms(timings.arrival_time_s, first_s),
        "generation_time_ms": generation_ms,
        "queue_time_ms": _ms(timings.arrival_time_s, timings.scheduled_time_s),
        "mean_itl_ms": None if generation_ms is None or num_tokens < 2 else round(generation_ms / (num_tokens - 1), 3),
        "tokens_per_second": round(1000 * num_tokens / inference_ms, 3) if inference_ms else None,
    }


def _ms(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else round(1000 * (end_s - start_s), 3)
