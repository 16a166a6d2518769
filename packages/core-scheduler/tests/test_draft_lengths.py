"""Adaptive drafts: as many as repay their cost, by what was right before."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_core_scheduler import Scheduler, SchedulerConfig, SpeculativeConfig
from llmstack_core_scheduler.draft_costs import (
    NUMS_DRAFTS,
    QUANTIZED,
    QUANTIZED_STEP_BYTES,
    QUANTIZED_STEP_COSTS,
    SMALL_STEP_BYTES,
    SMALL_STEP_COSTS,
    STEP_BYTES,
    STEP_COSTS,
    draft_costs,
)
from llmstack_core_scheduler.draft_lengths import LEAST_GAIN, AcceptanceRate, DraftLengths
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams

CONFIG = SpeculativeConfig("ngram", 8, is_adaptive=True)


def run(lengths, is_right, num_steps=200, num_rows=1):
    """Numbers of drafts of the request's steps, all of which are right or none."""
    found = []
    for _ in range(num_steps):
        length = lengths.limit("a", 8, num_rows, num_rows)
        found.append(length)
        if length:
            lengths.note_verified("a", length, length if is_right else 0)
    return found


def test_right_drafts_become_longer_and_wrong_ones_end():
    right, wrong = run(DraftLengths(CONFIG), is_right=True), run(DraftLengths(CONFIG), is_right=False)
    assert right[0] == wrong[0] == 3
    assert right[-1] == 8
    assert sum(wrong) < 0.4 * len(wrong)
    assert sum(wrong[100:]) > 0  # they are tried again, in case the text has changed


def test_a_request_that_has_ended_leaves_nothing():
    lengths = DraftLengths(CONFIG)
    run(lengths, is_right=True)
    lengths.forget("a")
    lengths.note_verified("a", 8, 8)  # of a row that was under way
    assert run(lengths, is_right=True)[0] == 3


def test_a_scheduler_forgets_the_drafts_of_requests_that_have_ended():
    config = SchedulerConfig(max_num_batched_tokens=64, max_model_len=64, speculative=CONFIG)
    scheduler = Scheduler(config, FakeKVCacheManager(40, 4))
    scheduler.add_request(EngineCoreRequest("a", [7] * 8, SamplingParams(max_tokens=12)))
    seen = set()
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(0.0)
        seen |= scheduler._drafting._lengths._rates.keys()
        sampled = [[*row.draft_token_ids, 7] for row in scheduled.scheduled_requests]
        output = ModelRunnerOutput([row.request_id for row in scheduled.scheduled_requests], sampled)
        scheduler.update_from_output(scheduled, output, 0.0)
    assert seen == {"a"}
    assert not scheduler._drafting._lengths._rates


def test_after_a_long_failure_a_repetition_is_found_again():
    lengths = DraftLengths(CONFIG)
    run(lengths, is_right=False)
    assert run(lengths, is_right=True, num_steps=60)[-1] == 8


def test_more_rows_need_a_better_chance_and_a_large_step_has_no_drafts():
    firsts = [DraftLengths(CONFIG).limit("a", 8, num_rows, num_rows) for num_rows in (1, 2, 4, 8, 16, 31, 32)]
    assert firsts == sorted(firsts, reverse=True)
    assert (firsts[0], firsts[-1]) == (3, 0)
    assert DraftLengths(CONFIG).limit("a", 8, 1, 31) == 1
    assert DraftLengths(CONFIG).limit("a", 8, 1, 512) == 0


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=60), st.floats(0.01, 1.0))
def test_a_longer_row_never_follows_from_a_higher_demand(verified, least_chance):
    rate = AcceptanceRate()
    for num_drafts, num_right in verified:
        rate.note_verified(num_drafts, min(num_right, num_drafts))
    assert 0 <= rate.num_right <= rate.num_tried <= 40
    lengths = [rate.max_length(chance, 8) for chance in (least_chance / 2, least_chance, 1.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0


def test_what_is_known_of_a_request_ends_with_its_row():
    lengths = DraftLengths(CONFIG)
    run(lengths, is_right=True)
    lengths.forget("a")
    assert lengths.limit("a", 8, 1, 1) == 3
    lengths.forget("nothing")


class Wrong:
    def propose(self, request_id, token_ids, max_num_tokens, owner):
        return [7] * max_num_tokens

    def learn(self, owner, token_ids):
        pass

    def forget(self, request_id):
        pass


def test_a_scheduler_learns_which_drafts_are_right():
    config = SchedulerConfig(max_num_batched_tokens=64, max_model_len=64, speculative=CONFIG)
    scheduler = Scheduler(config, FakeKVCacheManager(40, 4), draft_source=Wrong())
    scheduler.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(max_tokens=50)))
    numbers = []
    for _ in range(50):
        scheduled = scheduler.schedule(0.0)
        (row,) = scheduled.scheduled_requests
        numbers.append(len(row.draft_token_ids))
        scheduler.update_from_output(scheduled, ModelRunnerOutput(["a"], [[1]]), 0.0)
    assert numbers[:3] == [3, 2, 1]
    assert sum(numbers) < 25


@pytest.mark.parametrize("fields", [{"token_cost": 0.0}, {"token_cost": 1.5}, {"max_num_step_tokens": 1}])
def test_costs_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        replace(CONFIG, **fields)


@pytest.mark.parametrize("variant", STEP_COSTS)
def test_measured_costs_are_those_of_the_table_and_linear_between(variant):
    for num_rows, costs in STEP_COSTS[variant].items():
        found = draft_costs(variant, num_rows, 8)
        assert [found[number] for number in NUMS_DRAFTS] == pytest.approx(costs)
        assert found[5] == pytest.approx((costs[NUMS_DRAFTS.index(4)] + costs[NUMS_DRAFTS.index(6)]) / 2)
        assert draft_costs(variant, num_rows, 10)[10] == pytest.approx(2 * costs[-1] - costs[-2])
    assert draft_costs(variant, 3, 4) == draft_costs(variant, 4, 4)
    assert draft_costs(variant, 64, 4) == draft_costs(variant, max(STEP_COSTS[variant]), 4)


def test_a_variant_that_was_not_measured_has_no_costs():
    assert draft_costs("portable", 1, 4) == draft_costs("portable", 1, 4, SMALL_STEP_BYTES) == ()


@pytest.mark.parametrize("variant", QUANTIZED_STEP_COSTS)
def test_weights_of_few_bits_have_costs_of_their_own(variant):
    name = variant + QUANTIZED
    for num_rows, costs in QUANTIZED_STEP_COSTS[variant].items():
        found = draft_costs(name, num_rows, 8, QUANTIZED_STEP_BYTES)
        assert [found[number] for number in NUMS_DRAFTS] == pytest.approx(costs)
    assert draft_costs(name, 1, 8)[1] > 1.1 * draft_costs(variant, 1, 8)[1]
    small = draft_costs(name, 1, 8, SMALL_STEP_BYTES)
    assert [small[number] for number in NUMS_DRAFTS] == pytest.approx(SMALL_STEP_COSTS[variant][1])
    wrong = run(DraftLengths(replace(CONFIG, variant=name)), is_right=False)
    assert sum(draft_costs(name, 1, 8)[number] - 1.0 for number in wrong) / len(wrong) < 0.02
    assert run(DraftLengths(replace(CONFIG, variant=name)), is_right=True)[-1] >= 3


def test_a_variant_whose_quantized_weights_were_not_measured_has_the_costs_of_others():
    assert draft_costs("avx512bf16" + QUANTIZED, 4, 8) == draft_costs("avx512bf16", 4, 8)
    assert draft_costs("portable" + QUANTIZED, 1, 4) == ()


@pytest.mark.parametrize("variant", STEP_COSTS)
def test_between_the_two_models_costs_fall_with_the_inverse_of_the_bytes(variant):
    large, small = draft_costs(variant, 1, 8), draft_costs(variant, 1, 8, SMALL_STEP_BYTES)
    assert [small[number] for number in NUMS_DRAFTS] == pytest.approx(SMALL_STEP_COSTS[variant][1])
    assert draft_costs(variant, 1, 8, SMALL_STEP_BYTES // 2) == pytest.approx(small)
    assert draft_costs(variant, 1, 8, STEP_BYTES) == draft_costs(variant, 1, 8, 10 * STEP_BYTES) == large
    middle = 2 / (1 / SMALL_STEP_BYTES + 1 / STEP_BYTES)
    means = [(one + other) / 2 for one, other in zip(large, small, strict=True)]
    assert draft_costs(variant, 1, 8, round(middle)) == pytest.approx(means)


@pytest.mark.parametrize("variant", STEP_COSTS)
def test_a_small_model_has_no_drafts_until_they_would_repay_the_calls(variant):
    config = replace(CONFIG, variant=variant, step_bytes=SMALL_STEP_BYTES)
    assert not DraftLengths(config).may_have_drafts(1)
    assert not any(run(DraftLengths(config), is_right=True))
    large = DraftLengths(replace(config, step_bytes=STEP_BYTES))
    assert large.may_have_drafts(1)
    assert any(run(large, is_right=True))
    assert DraftLengths(CONFIG).may_have_drafts(1)  # no costs were measured


def test_rows_that_had_drafts_are_looked_at_in_steps_of_any_size():
    lengths = DraftLengths(replace(CONFIG, variant="avx512bf16"))
    assert not lengths.may_have_drafts(16)
    run(lengths, is_right=True)
    assert lengths.may_have_drafts(16)
    lengths.forget("a")
    assert not lengths.may_have_drafts(16)


def test_drafts_of_a_step_repay_what_they_cost_all_of_its_rows():
    lengths = DraftLengths(replace(CONFIG, variant="avx512bf16"))
    names = ["a", "b", "c", "d"]
    for name in names:
        lengths.limit(name, 8, 4, 4)
        lengths.note_verified(name, 30, 28)
    assert LEAST_GAIN * draft_costs("avx512bf16", 4, 1)[1] < 1 + 29 / 32 / 4
    assert lengths.repay([(name, 1) for name in names[:3]], 4)
    assert lengths.repay([("a", 1)], 4)
    for _ in range(40):
        lengths.note_verified("a", 1, 0)
    assert not lengths.repay([("a", 1)], 4)
    assert DraftLengths(CONFIG).repay([("a", 1)], 4)  # no costs were measured


def test_drafts_that_do_not_repay_are_left_out_of_the_step():
    config = SchedulerConfig(max_num_batched_tokens=64, max_model_len=64, speculative=replace(CONFIG, variant="avx2"))
    scheduler = Scheduler(config, FakeKVCacheManager(40, 4))
    scheduler.add_request(EngineCoreRequest("repeats", [7] * 8, SamplingParams(max_tokens=20)))
    for name in range(3):
        prompt = [11 * name + place for place in range(1, 9)]
        scheduler.add_request(EngineCoreRequest(str(name), prompt, SamplingParams(max_tokens=20)))
    new = iter(range(100, 200))
    for _ in range(8):
        scheduled = scheduler.schedule(0.0)
        assert not any(row.draft_token_ids for row in scheduled.scheduled_requests)  # one of four rows has some
        ids = [row.request_id for row in scheduled.scheduled_requests]
        sampled = [[7 if one == "repeats" else next(new)] for one in ids]
        scheduler.update_from_output(scheduled, ModelRunnerOutput(ids, sampled), 0.0)


def test_drafts_by_measured_costs_need_a_gain():
    rate = AcceptanceRate()
    rate.note_verified(30, 30)
    assert rate.best_length([1.0, 1.1, 1.2, 1.3]) == 3
    assert rate.best_length([1.0, 1.1, 1.2, 4.0]) == 2
    assert rate.best_length([1.0, 1.99, 2.99, 3.99]) == 0
    wrong = AcceptanceRate()
    wrong.note_verified(1, 0)  # one in three is right
    assert wrong.best_length([1.0, 4 / 3 / LEAST_GAIN - 0.001]) == 1
    assert wrong.best_length([1.0, 4 / 3 / LEAST_GAIN + 0.001]) == 0


@pytest.mark.parametrize("variant", STEP_COSTS)
def test_with_measured_costs_wrong_drafts_cost_little_and_right_ones_are_many(variant):
    config = replace(CONFIG, variant=variant)
    for num_rows in (1, 4, 16):
        wrong = run(DraftLengths(config), is_right=False, num_rows=num_rows)
        lost = [draft_costs(variant, num_rows, 8)[number] - 1.0 for number in wrong]
        assert sum(lost) / len(lost) < 0.025
    assert run(DraftLengths(config), is_right=True)[-1] >= 3
