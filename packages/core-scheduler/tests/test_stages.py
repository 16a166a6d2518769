"""With several stages, steps of prompts are small, so that each stage has work soon."""

from collections import deque

import pytest
from core_scheduler_helpers.steps import answer, make_request, make_scheduler, rows_of

from llmstack_core_scheduler import SchedulerConfig


def sizes_of_steps(scheduler, num_stages=2, **tokens):
    """The tokens of each step, with up to `num_stages` steps under way."""
    sizes, under_way = [], deque()
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(0.0)
        sizes.append(rows_of(scheduled))
        under_way.append(scheduled)
        while under_way and (len(under_way) == num_stages or not rows_of(under_way[-1])):
            scheduled = under_way.popleft()
            scheduler.update_from_output(scheduled, answer(scheduled, **tokens), 0.0)
    return [rows for rows in sizes if rows]


def test_steps_of_a_prompt_are_a_sixteenth_of_it():
    scheduler = make_scheduler(pipeline_parallel_size=2, min_stage_tokens=8)
    scheduler.add_request(make_request("a", 320, max_tokens=1))
    assert sizes_of_steps(scheduler) == [{"a": 20}, *[{"a": 21}] * 14, {"a": 6}]


def test_small_steps_have_a_least_size_and_at_most_the_budget():
    least = make_scheduler(pipeline_parallel_size=2, min_stage_tokens=30)
    least.add_request(make_request("a", 100, max_tokens=1))
    assert [rows["a"] for rows in sizes_of_steps(least)] == [30, 31, 31, 8]
    most = make_scheduler(pipeline_parallel_size=2, min_stage_tokens=8, max_num_batched_tokens=10)
    most.add_request(make_request("a", 320, max_tokens=1))
    assert [rows["a"] for rows in sizes_of_steps(most)] == [10] * 32


def test_prompts_that_wait_make_small_steps_larger():
    scheduler = make_scheduler(pipeline_parallel_size=2, min_stage_tokens=8, max_num_seqs=1)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 320, max_tokens=1))
    assert sizes_of_steps(scheduler)[:2] == [{"a": 40}, {"a": 41}]


def test_each_stage_has_its_share_of_the_running_requests():
    scheduler = make_scheduler(pipeline_parallel_size=2)
    for name in "abcde":
        scheduler.add_request(make_request(name, 4, max_tokens=8))
    rows = sizes_of_steps(scheduler)
    assert set(rows[0]) == set("abcde")
    assert all(len(one) <= 3 for one in rows[1:])
    assert sum(len(one) for one in rows) == 5 * 8


@pytest.mark.parametrize("changes", [{"pipeline_parallel_size": 1}, {"min_stage_tokens": 0}])
def test_steps_are_large_where_nothing_is_won_by_small_ones(changes):
    scheduler = make_scheduler(**{"pipeline_parallel_size": 2, "min_stage_tokens": 8} | changes)
    scheduler.add_request(make_request("a", 320, max_tokens=1))
    assert [rows["a"] for rows in sizes_of_steps(scheduler)] == [64] * 5
    assert not SchedulerConfig(enable_chunked_prefill=False, pipeline_parallel_size=2).has_small_steps


def test_a_preempted_request_waits_for_the_stage_that_still_computes_its_row():
    scheduler = make_scheduler(num_blocks=3, pipeline_parallel_size=2)
    for name in ("old", "young"):
        scheduler.add_request(make_request(name, 15, max_tokens=5))
    steps = [scheduler.schedule(0.0) for _ in range(2)]
    assert [set(rows_of(one)) for one in steps] == [{"old", "young"}, set()]
    done = []
    while scheduler.has_unfinished_requests():
        scheduled = steps.pop(0)
        output = scheduler.update_from_output(scheduled, answer(scheduled), 0.0)
        done += [message.request_id for message in output.outputs for _ in message.new_token_ids]
        steps.append(scheduler.schedule(0.0))
        names = [name for one in steps for name in rows_of(one)]
        assert len(names) == len(set(names))
    assert sorted(done) == ["old"] * 5 + ["young"] * 5
    assert scheduler.stats().num_preemptions
