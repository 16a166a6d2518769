"""Deadlines in explanations: met or not, and whether a lone request meets it."""

from __future__ import annotations

from dataclasses import replace

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_insight.explain.estimates import model_of_steps
from llmstack_insight.explain.explanation import Explanation, missed_deadline
from llmstack_insight.explain.what_if import TooMuchError, run_again
from llmstack_insight.explain.wording import to_text
from llmstack_insight.explain.workload import Arrival, Workload
from llmstack_step_log.control_plane import CacheConfig
from llmstack_types import EngineCoreRequest, RequestStatus, StepRecording


def add_deadline(
    made: Explanation, log: StepRecording, arrival: Arrival | None, scheduler: SchedulerConfig, cache: CacheConfig
) -> None:
    """Says of a request that missed its deadline whether it could have met it alone, by estimate.

    `arrival`: The request, of which the length of its prompt must be known.
    """
    if made.facts.get("deadline") != "missed" or arrival is None:
        return
    given_s = log.notes[made.request_id].given_s
    num_tokens = _num_tokens(log, arrival.request) or 1
    alone_s = _alone_s(arrival, num_tokens, log, scheduler, cache)
    if alone_s is None:
        return
    tokens = "its first token takes" if num_tokens == 1 else f"the {num_tokens} tokens that it got take"
    missed = missed_deadline(given_s)
    at = made.sentences.index(missed)
    if alone_s > given_s:
        made.facts["deadline"] = "unreachable"
        made.sentences[at] = (
            f"Its deadline of {to_text(given_s)} could not be met: by estimate, even alone {tokens} {to_text(alone_s)}."
        )
    else:
        more = ", and more were to come" if made.facts["status"] == RequestStatus.FINISHED_ABORTED.value else ""
        made.sentences[at] = f"{missed.removesuffix('.')}: by estimate, alone {tokens} {to_text(alone_s)}{more}."


def _num_tokens(log: StepRecording, request: EngineCoreRequest) -> int:
    """The number of tokens of the answer: each row past the prompt gives one."""
    rows = [row for record in log.steps for row in record.rows if row.request_id == request.request_id]
    if not rows:
        return 0
    num_known = rows[-1].num_computed_tokens + rows[-1].num_scheduled_tokens - len(rows[-1].draft_token_ids)
    return max(0, num_known + 1 - len(request.prompt_token_ids))


def _alone_s(
    own: Arrival, num_tokens: int, log: StepRecording, scheduler: SchedulerConfig, cache: CacheConfig
) -> float | None:
    """The seconds of so many tokens without other requests, with what it found cached; None without a cost model."""
    params = own.request.sampling_params
    params = replace(params, ignore_eos=True, min_tokens=0, stop_token_ids=[], max_tokens=num_tokens)
    arrival = Arrival(
        replace(own.request, sampling_params=params), 0.0, [0] * num_tokens, num_found_tokens=own.num_found_tokens
    )
    try:
        model = model_of_steps(log.steps)
        return run_again(Workload(own.request.request_id, [arrival], has_tokens=True), scheduler, cache, model).total_s
    except (SimulationError, TooMuchError):
        return None
