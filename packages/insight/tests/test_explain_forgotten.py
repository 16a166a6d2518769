"""Explanations of requests whose first steps a running server no longer keeps: it keeps states for longer."""

from __future__ import annotations

import pytest
from engine_core_helpers.small_cores import LIMITS, add, build, run

from llmstack_core_scheduler import SchedulerConfig
from llmstack_insight.explain import Explanation, add_estimates, explain, workload_of_steps
from llmstack_step_log.control_plane import CacheConfig
from llmstack_types import RequestNote, RequestStatus, StepRecord, StepRecording

NO_LONGER_KEPT = "Its steps are no longer kept: a step log may have them (--log)."


def log_of_two() -> StepRecording:
    """`r` has a prompt of 10 tokens and 12 steps; `later` comes when it has ended."""
    core = build()
    add(core, "r", 10, max_tokens=12)
    run(core)
    add(core, "later", 30, max_tokens=20, first=99)
    run(core)
    return core.recent_steps(0)


def without_first(log: StepRecording, num_steps: int) -> StepRecording:
    return log._replace(steps=log.steps[num_steps:])


def slower(step: StepRecord, seconds: float) -> StepRecord:
    """The step with so much more time after its tokens are known."""
    return step._replace(phases=step.phases._replace(update_s=step.phases.update_s + seconds))


def text_of(found: Explanation) -> str:
    return " ".join(found.sentences)


def test_a_request_of_which_no_step_is_kept_was_in_steps_nevertheless() -> None:
    log = log_of_two()
    whole, found = explain(log, "r"), explain(without_first(log, 12), "r")
    assert found.facts["total_ms"] == whole.facts["total_ms"]
    assert found.sentences[0].endswith(f" after it came. {NO_LONGER_KEPT}")
    assert found.sentences[1].endswith(" The cause is no longer known.")
    assert found.facts["queue_ms"] == whole.facts["queue_ms"]
    assert (len(found.sentences), found.facts["kept_steps"]) == (2, 0)


def test_the_steps_that_are_left_are_neither_a_queue_nor_a_prompt() -> None:
    log = log_of_two()
    whole, found = explain(log, "r"), explain(without_first(log, 5), "r")
    assert found.facts["total_ms"] == whole.facts["total_ms"]
    assert "Its first steps are no longer kept: what follows is of the last 7." in text_of(found)
    assert found.facts["queue_ms"] == whole.facts["queue_ms"]
    assert (found.facts["kept_steps"], found.facts["decode_steps"]) == (7, 7)
    assert not {"ttft_ms", "prompt_tokens", "cached_tokens", "spans_ms", "alone_ms"} & set(found.facts)


def test_its_times_are_the_same_however_many_of_its_steps_are_kept() -> None:
    log = log_of_two()
    log = log._replace(steps=[slower(step, 0.4321e-3 * number) for number, step in enumerate(log.steps)])
    for name, num_steps in (("r", 12), ("later", len(log.steps))):
        whole = explain(log, name).facts
        for kept in range(num_steps + 1):
            cut = explain(without_first(log, kept), name).facts
            assert (cut["total_ms"], cut["queue_ms"]) == (whole["total_ms"], whole["queue_ms"])


@pytest.mark.parametrize("max_tokens", [1, 2, 12])
def test_the_parts_of_a_request_are_no_longer_than_the_whole(max_tokens: int) -> None:
    core = build()
    for number in range(8):  # for an estimate
        add(core, f"before{number}", 10, first=number + 20)
        run(core)
    add(core, "r", 10, max_tokens=max_tokens)
    run(core)
    log = core.recent_steps(0)
    log = log._replace(steps=[slower(step, 0.01) for step in log.steps])
    found = explain(log, "r")
    add_estimates(found, log, workload_of_steps(log, "r"), SchedulerConfig(**LIMITS), CacheConfig(64, 4))
    facts = found.facts
    measured = facts["replayed"]["measured"]
    assert (measured["total_ms"], measured["ttft_ms"]) == (facts["total_ms"], facts["ttft_ms"])
    assert facts["queue_ms"] <= facts["ttft_ms"] <= facts["total_ms"]
    assert facts["total_ms"] == pytest.approx(sum(facts["spans_ms"].values()))


def test_what_only_its_last_steps_show_is_not_estimated() -> None:
    log = without_first(log_of_two(), 5)
    assert workload_of_steps(log, "r") is None
    assert workload_of_steps(log, "later") is not None
    found = explain(log, "r")
    scheduler, cache = SchedulerConfig(**LIMITS), CacheConfig(64, 4)
    add_estimates(found, log, workload_of_steps(log, "r"), scheduler, cache)
    assert found.facts["no_estimate"] == "its beginning is no longer kept, or it has no token yet"


def test_an_end_alone_has_neither_a_time_nor_a_deadline_that_was_met() -> None:
    log = without_first(log_of_two(), 12)
    ended = [event for event in log.events if event.status is RequestStatus.FINISHED_LENGTH_CAPPED]
    found = explain(log._replace(events=ended, notes={"r": RequestNote(given_s=5.0)}), "r")
    assert found.sentences == [f"It ended (length limit). {NO_LONGER_KEPT}"]
    assert not {"total_ms", "deadline"} & set(found.facts)


def test_preemptions_in_forgotten_steps_are_counted_and_name_no_request() -> None:
    core = build(num_blocks=9)
    add(core, "first", 11, max_tokens=20)
    add(core, "second", 3, max_tokens=30, first=99)
    run(core)
    log = core.recent_steps(0)
    (preempted_s,) = [event.time_s for event in log.events if event.status is RequestStatus.PREEMPTED]
    kept = [step for step in log.steps if step.start_s > preempted_s]
    found = explain(log._replace(steps=kept[2:]), "second")
    assert found.facts["preemptions"] == 1
    assert "It was preempted 1 time in steps that are no longer kept." in found.sentences
    assert "first needed blocks" not in text_of(found)


def test_a_request_that_ended_in_the_queue_was_in_no_step() -> None:
    core = build(max_num_seqs=1)
    add(core, "long", 10, max_tokens=5)
    core.step()
    add(core, "r", 4, first=99)
    core.abort_requests(["r"])
    run(core)
    assert explain(core.recent_steps(0), "r").sentences[1] == "It was in no step."
