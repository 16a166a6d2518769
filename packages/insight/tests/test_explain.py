"""Explanations of requests whose causes are known."""

from __future__ import annotations

import pytest
from engine_core_helpers.small_cores import LIMITS, add, added_during_a_step, build, run, run_with_a_yield
from engine_core_helpers.steps import step_record, step_records

from llmstack_engine_core import EngineCore
from llmstack_insight.explain import Explanation, Limits, UnknownRequestError, explain, last_part, parts_in
from llmstack_insight.explain.answers import parts_of
from llmstack_insight.explain.explanation import FOREIGN
from llmstack_types import RequestEvent, RequestStatus, ScheduledRequest, StepRecording


def explained(core: EngineCore, name: str, **changes: int) -> Explanation:
    limits = LIMITS | changes
    known = Limits(
        limits["max_num_seqs"],
        limits["max_num_batched_tokens"],
        max_prefill_tokens=limits.get("max_prefill_tokens"),
    )
    return explain(core.recent_steps(0), name, known)


def run_behind_a_long_prompt() -> EngineCore:
    """A prompt of 90 tokens is computed in steps of 16, and `r` comes during that."""
    core = build()
    add(core, "long", 90)
    core.step()
    add(core, "r", 8, first=99)
    run(core)
    return core


def test_a_request_alone_has_waited_for_nothing() -> None:
    core = build()
    add(core, "r", 10)
    run(core)
    found = explained(core, "r")
    assert found.sentences[0].startswith("It ended (length limit), ")
    assert "no step was being computed" in found.sentences[1]
    assert found.facts["prompt_tokens"] == 10
    assert (found.facts["prefill_steps"], found.facts["decode_steps"], found.facts["preemptions"]) == (1, 3, 0)
    assert "queue_cause" not in found.facts


def test_a_long_prompt_ahead_is_named() -> None:
    found = explained(run_behind_a_long_prompt(), "r")
    assert (found.facts["queue_cause"], found.facts["queued_behind"]) == ("token budget", "long")
    assert "others used all 16 tokens of each step" in " ".join(found.sentences)


def test_prompts_that_left_no_room_for_its_own_are_the_cause() -> None:
    core = build(max_prefill_tokens=8)
    for name, first in (("a", 0), ("b", 50), ("c", 100), ("r", 150)):
        add(core, name, 7, first=first)
    run(core)
    found = explained(core, "r", max_prefill_tokens=8)
    assert found.facts["queue_cause"] == "prefill tokens"
    assert "prompts of others left no room for its own (--max-prefill-tokens 8)" in " ".join(found.sentences)


def test_a_wait_whose_first_steps_are_no_longer_kept_says_so() -> None:
    log = run_behind_a_long_prompt().recent_steps(0)
    whole, cut = explain(log, "r"), explain(log._replace(steps=log.steps[3:]), "r")
    assert whole.facts["queue_steps"] == cut.facts["queue_steps"] + 2
    assert "queue_forgotten_ms" not in whole.facts
    assert cut.facts["queue_forgotten_ms"] <= cut.facts["queue_ms"]
    assert cut.sentences[2].startswith("This is of the steps that are still kept: those of its first ")


def test_the_step_during_which_a_request_came_is_part_of_its_wait() -> None:
    core = build()
    step, came_s = added_during_a_step(core, lambda step: step.start_s + 1e-6)
    assert came_s == step.start_s + 1e-6
    found = explained(core, "r")
    assert (found.facts["queue_cause"], found.facts["queued_behind"]) == ("step", "long")
    assert "it came during step 1, which took " in " ".join(found.sentences)
    assert "Most of what was computed meanwhile, 12 prompt tokens, was of long." in found.sentences


@pytest.mark.parametrize("shift_s", [-1e6, 1e6])
def test_the_clock_of_another_machine_moves_an_arrival_by_a_step_at_most(shift_s: float) -> None:
    core = build()
    step, came_s = added_during_a_step(core, lambda step: step.start_s + shift_s)
    assert step.start_s <= came_s < step.start_s + 10


def test_a_request_for_an_idle_engine_core_came_when_it_was_added() -> None:
    core = build()
    before_s = core.now_s()
    add(core, "r", 8, arrival_time_s=before_s - 50)
    run(core)
    assert core.recent_steps(0).events[0].time_s >= before_s
    assert "queue_cause" not in explained(core, "r").facts


def test_a_request_that_ends_with_a_step_took_a_place_of_it() -> None:
    core = build(max_num_seqs=2)
    for number in range(6):
        add(core, f"r{number}", 4, max_tokens=3 + number, first=number + 1)
    run(core)
    found = explained(core, "r5", max_num_seqs=2)
    assert (found.facts["queue_cause"], found.facts["queued_behind_requests"]) == ("places", 5)
    assert "Meanwhile 5 other requests had a part in the steps, most of all r" in " ".join(found.sentences)


def test_the_parts_of_the_time_add_up_to_all_of_it() -> None:
    core = build(num_blocks=9)
    add(core, "first", 11, max_tokens=20)
    add(core, "second", 3, max_tokens=30, first=99)
    run(core)
    for name in ("first", "second"):
        facts = explained(core, name).facts
        spans = facts["spans_ms"]
        assert sum(spans.values()) == pytest.approx(facts["total_ms"], abs=0.1 * len(spans))
        assert (spans["preempted"] > 0) == (name == "second")
        assert min(spans.values()) >= 0


def test_what_no_step_explains_is_said() -> None:
    log = steps_with_times([0.02, *[0.01] * 9], [0] * 10)
    late = [one._replace(start_s=one.start_s + 0.2 * (index > 4)) for index, one in enumerate(log.steps)]
    found = explain(log._replace(steps=late), "r")
    assert found.facts["spans_ms"]["between_steps"] == pytest.approx(200.0)
    assert "Between its steps 200 ms passed: the engine core handled messages" in " ".join(found.sentences)


def test_taken_places_are_named() -> None:
    core = build(max_num_seqs=2)
    for name in ("a", "b"):
        add(core, name, 4, max_tokens=20)
    core.step()
    core.step()
    add(core, "r", 4)
    run(core)
    found = explained(core, "r", max_num_seqs=2)
    assert found.facts["queue_cause"] == "places"
    assert "all 2 places of a step were taken" in " ".join(found.sentences)


def test_a_full_cache_is_named() -> None:
    core = build(num_blocks=9)
    add(core, "a", 24, max_tokens=8)
    core.step()
    core.step()
    add(core, "r", 16, first=99)
    run(core)
    found = explained(core, "r")
    assert found.facts["queue_cause"] == "blocks"


def test_a_preemption_names_who_needed_the_blocks() -> None:
    core = build(num_blocks=9)
    add(core, "first", 11, max_tokens=20)
    add(core, "second", 3, max_tokens=30, first=99)
    run(core)
    found = explained(core, "second")
    assert found.facts["preemptions"] == 1
    (sentence,) = [one for one in found.sentences if "preempted" in one]
    assert sentence.startswith("It was preempted since first needed blocks: it went on after ")
    assert found.facts["recomputed_tokens"] > 0


def test_a_place_that_was_given_to_another_key_is_the_cause_of_a_preemption() -> None:
    core = run_with_a_yield()
    found = explained(core, "r3")
    assert (found.facts["preemptions"], found.facts["yielded_places"]) == (1, 1)
    (sentence,) = [one for one in found.sentences if "preempted" in one]
    assert sentence.startswith("It was preempted to give a place to another key's request: it went on after ")
    assert found.facts["spans_ms"]["preempted"] > 0
    assert found.facts.get("recomputed_tokens", 0) < 4  # of a block of four
    assert "yielded_places" not in explained(core, "r0").facts


def test_the_tokens_in_the_prefix_cache_are_counted() -> None:
    core = build()
    add(core, "before", 12)
    run(core)
    add(core, "r", 12)
    run(core)
    found = explained(core, "r")
    assert (found.facts["cached_tokens"], found.facts["prompt_tokens"]) == (8, 12)
    assert "The prefix cache held 8 of the 12 tokens of its prompt." in found.sentences


def steps_with_times(durations: list[float], other_tokens: list[int]) -> StepRecording:
    steps, now_s = [], 10.0
    for index, (seconds, tokens) in enumerate(zip(durations, other_tokens, strict=True)):
        rows = [ScheduledRequest("r", 7 + index, 1 if index else 8, [])]
        rows += [ScheduledRequest("other", 0, tokens, [])] if tokens else []
        steps.append(step_record(index + 1, rows, now_s, (0.0, seconds, 0.0), num_running=2))
        now_s += seconds
    events = [RequestEvent("r", RequestStatus.WAITING_FOR_GRAMMAR, 9.0), RequestEvent("r", RequestStatus.WAITING, 9.75)]
    return StepRecording(now_s, steps, events)


def test_prompts_of_others_beside_its_decodes_are_measured() -> None:
    log = steps_with_times([0.02, *[0.01] * 9, 0.05], [*[0] * 10, 40])
    found = explain(log, "r")
    assert (found.facts["slowed_steps"], found.facts["slowed_ms"]) == (1, 40.0)
    text = " ".join(found.sentences)
    assert "1 of these steps also computed prompts of other requests, the longest of other." in text
    assert found.facts["model_error"] < 0.05
    assert found.facts["alone_ms"] == pytest.approx(120, abs=5)


def test_a_grammar_is_a_wait_of_its_own() -> None:
    found = explain(steps_with_times([0.02, 0.01], [0, 0]), "r")
    assert found.facts["waiting_for_grammar_ms"] == 750.0
    assert "It waited 750 ms while its grammar was compiled." in found.sentences


def test_few_steps_give_no_estimate() -> None:
    assert "alone_ms" not in explain(steps_with_times([0.02, 0.01], [0, 0]), "r").facts


def test_requests_of_others_are_not_named() -> None:
    log = steps_with_times([0.02, *[0.01] * 9, 0.05], [*[0] * 10, 40])
    text = " ".join(explain(log, "r", is_shown=lambda name: name == "r").sentences)
    assert FOREIGN in text
    assert "other," not in text.replace(FOREIGN, "")


@pytest.mark.parametrize(("num_tokens", "shown"), [(40, 64), (64, 64), (65, 128), (90, 128)])
def test_lengths_of_others_are_shown_in_powers_of_two(num_tokens: int, shown: int) -> None:
    core = build(max_num_batched_tokens=128)
    core.step()
    for name, length in (("foreign", num_tokens), ("r", 8)):
        add(core, name, length, first=ord(name[0]))
    run(core)
    log, limits = core.recent_steps(0), Limits(4, 128)
    own, all_ = (explain(log, "r", limits, is_shown) for is_shown in (lambda name: name == "r", None))
    assert f"beside {shown} tokens of other prompts" in " ".join(own.sentences)
    assert f"beside {num_tokens} tokens of other prompts" in " ".join(all_.sentences)


def test_what_a_waiting_request_sees_of_others_has_no_length_or_count_of_theirs() -> None:
    core = build(num_blocks=25)
    add(core, "foreign", 87, max_tokens=10)
    core.step()
    add(core, "r", 30, first=99)
    run(core)
    log, limits = core.recent_steps(0), Limits(LIMITS["max_num_seqs"], LIMITS["max_num_batched_tokens"])
    own, all_ = (explain(log, "r", limits, is_shown) for is_shown in (lambda name: name == "r", None))
    assert all_.facts["queued_behind_tokens"] == 71  # 16 were computed before
    assert own.facts["queued_behind_tokens"] == 128
    assert "71 prompt tokens" not in " ".join(own.sentences)
    assert own.facts["queue_cause"] == all_.facts["queue_cause"] == "blocks"
    assert "needed and fewer were free" in " ".join(own.sentences)


def test_the_steps_of_another_keys_request_are_no_length_of_it() -> None:
    core = build(max_num_seqs=1)
    add(core, "foreign", 4, max_tokens=13)
    core.step()
    add(core, "r", 4, first=99)
    run(core)
    limits = Limits(1, LIMITS["max_num_batched_tokens"])
    own, all_ = (explain(core.recent_steps(0), "r", limits, is_shown) for is_shown in (lambda name: name == "r", None))
    assert "Meanwhile 1 other request had a part in the steps, most of all foreign in 12 steps." in all_.sentences
    assert ": the only place of a step was taken, and 12 steps were computed" in " ".join(all_.sentences)
    assert f"Meanwhile 1 other request had a part in the steps, most of all {FOREIGN}." in own.sentences


def test_a_request_that_is_not_there_is_unknown() -> None:
    with pytest.raises(UnknownRequestError):
        explain(StepRecording(0.0, (), ()), "r")


def test_a_beam_search_is_one_request() -> None:
    rows = [
        [ScheduledRequest("r/beam-1", 0, 9, [1, 2, 3]), ScheduledRequest("other", 0, 5, [4])],
        [ScheduledRequest("other", 5, 1, [])],
        [ScheduledRequest("r/beam-2", 9, 1, []), ScheduledRequest("r/beam-3", 9, 1, [5])],
        [ScheduledRequest("r/beam-4", 8, 3, []), ScheduledRequest("other", 6, 1, [])],
    ]
    steps = step_records(rows)
    ended = RequestStatus.FINISHED_LENGTH_CAPPED
    came = RequestStatus.WAITING
    states = [
        ("r/beam-1", came, 9.0), ("r/beam-1", ended, 10.5), ("r/beam-2", came, 10.5),
        ("r/beam-2", ended, 12.5), ("r/beam-4", came, 12.5), ("r/beam-4", ended, 13.6),
    ]  # fmt: skip
    log = StepRecording(20.0, steps, [RequestEvent(*one) for one in states], {"r/beam-1": "mine"})
    assert parts_in(log, "r") == parts_in(log, "r", "mine") == ["r"]
    assert last_part(log, ["r"]) == ("r", 13.5)
    found = explain(log, "r")
    assert found.sentences[:2] == [
        "It ended (length limit), 4.6 s after it came, with 3 steps.",
        "It was a beam search: 4 beams had a part in these steps.",
    ]
    facts = found.facts
    assert (facts["prompt_tokens"], facts["prefill_steps"], facts["decode_steps"], facts["beams"]) == (9, 1, 2, 4)
    assert facts["spans_ms"]["steps_of_others"] == 500
    assert sum(facts["spans_ms"].values()) == facts["total_ms"] == 4600
    running = log._replace(events=log.events[:5])
    assert explain(running, "r").sentences[0].startswith("It is not over, ")


def test_the_prompts_of_the_same_answer_are_not_those_of_others() -> None:
    rows = [ScheduledRequest(name, 0, size, []) for name, size in (("r-0", 4), ("r-1", 6), ("other", 5))]
    steps = step_records([rows])
    log = StepRecording(20.0, steps, [RequestEvent("r-0", RequestStatus.WAITING, 9.0)])
    text = " ".join(explain(log, "r-0", parts=["r-0", "r-1"]).sentences)
    assert "in one step of 500 ms, beside 5 tokens of other prompts, and 6 of the same answer." in text
    text = " ".join(explain(log, "r-0", parts=["r-0", "r-1", "other"]).sentences)
    assert "in one step of 500 ms, beside 11 of the same answer." in text


def test_a_preemption_without_another_request_names_the_cause() -> None:
    rows = [
        [ScheduledRequest("r", 0, 4, [1])],
        [ScheduledRequest("other", 9, 1, [])],
        [ScheduledRequest("r", 0, 5, [1])],
    ]
    steps = step_records(rows)
    states = [(RequestStatus.WAITING, 10.0), (RequestStatus.PREEMPTED, 11.0)]
    log = StepRecording(20.0, steps, [RequestEvent("r", *one) for one in states])
    text = " ".join(explain(log, "r").sentences)
    assert "It was preempted since no block of the KV cache was free: it went on after 1.0 s" in text


HEX = "0123456789abcdef" * 2


def test_an_id_that_the_client_gave_names_the_last_answer_with_it() -> None:
    given = "cmpl-my-id"
    first, last = f"{given}-{HEX}", f"{given}-{HEX[::-1]}"
    names = ["cmpl-my-id-2", f"{first}-0", f"{last}-0", f"{last}-1", f"cmpl-my-ids-{HEX}-0"]
    assert parts_of(given, names[1:]) == [f"{last}-0", f"{last}-1"]
    assert parts_of(first, names) == [f"{first}-0"]
    assert parts_of("cmpl", [f"cmpl-{HEX}-0"]) == []
