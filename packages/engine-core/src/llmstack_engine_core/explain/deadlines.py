"""Whether a request met its deadline, and could have met it alone."""

from __future__ import annotations

from dataclasses import replace

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core.control_plane import CacheConfig
from llmstack_engine_core.explain.estimates import model_of_steps
from llmstack_engine_core.explain.explanation import Explanation, to_ms, to_text
from llmstack_engine_core.explain.what_if import TooMuchError, run_again
from llmstack_engine_core.explain.workload import Arrival, Workload
from llmstack_engine_core.prediction.errors import SimulationError
from llmstack_engine_core.step_log import Run
from llmstack_types import EngineCoreRequest, RequestStatus, StepRecording


def add_deadline(
    made: Explanation, run: Run, log: StepRecording, scheduler: SchedulerConfig, cache: CacheConfig
) -> None:
    """Adds a sentence on the deadline of the request, if it has one; only a log contains it."""
    requests, _ = run.requests_up_to(made.request_id, 1)
    if not requests or requests[0].deadline_s is None:
        return
    request, deadline_s = requests[0], requests[0].deadline_s
    given_s = deadline_s - request.arrival_time_s
    made.facts["deadline_ms"] = to_ms(given_s)
    is_whole = made.facts["status"] not in (None, RequestStatus.FINISHED_ABORTED.value)
    if is_whole and made.facts["total_ms"] <= to_ms(given_s):
        made.facts["deadline"] = "met"
        made.sentences.append(f"It met its deadline of {to_text(given_s)}.")
        return
    num_tokens = _num_tokens(log, request) or 1
    tokens = "its first token takes" if num_tokens == 1 else f"the {num_tokens} tokens that it got take"
    alone_s = _alone_s(request, num_tokens, log, scheduler, cache)
    made.facts["deadline"] = "missed" if alone_s is None or alone_s <= given_s else "unreachable"
    if alone_s is None:
        made.sentences.append(f"It missed its deadline of {to_text(given_s)}.")
    elif alone_s > given_s:
        made.sentences.append(
            f"Its deadline of {to_text(given_s)} could not be met: by estimate, even alone {tokens} {to_text(alone_s)}."
        )
    else:
        made.sentences.append(
            f"It missed its deadline of {to_text(given_s)}: by estimate, alone {tokens} {to_text(alone_s)}."
        )


def _num_tokens(log: StepRecording, request: EngineCoreRequest) -> int:
    """The tokens that it got, from its last row: each row past its prompt gives one."""
    rows = [row for record in log.steps for row in record.rows if row.request_id == request.request_id]
    if not rows:
        return 0
    num_known = rows[-1].num_computed_tokens + rows[-1].num_scheduled_tokens - len(rows[-1].draft_token_ids)
    return max(0, num_known + 1 - len(request.prompt_token_ids))


def _alone_s(
    request: EngineCoreRequest, num_tokens: int, log: StepRecording, scheduler: SchedulerConfig, cache: CacheConfig
) -> float | None:
    """The seconds of so many tokens without other requests, with what it found cached; None without a cost model."""
    rows = [row for record in log.steps for row in record.rows if row.request_id == request.request_id]
    params = replace(request.sampling_params, ignore_eos=True, min_tokens=0, stop_token_ids=[], max_tokens=num_tokens)
    arrival = Arrival(
        replace(request, sampling_params=params), 0.0, [0] * num_tokens,
        num_found_tokens=rows[0].num_computed_tokens if rows else 0,
    )  # fmt: skip
    try:
        model = model_of_steps(log.steps)
        return run_again(Workload(request.request_id, [arrival], has_tokens=True), scheduler, cache, model).total_s
    except (SimulationError, TooMuchError):
        return None
