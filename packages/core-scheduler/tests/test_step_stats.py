"""The statistics of a step, by name: what was computed, and what is left of the prompts."""

from __future__ import annotations

from llmstack_core_scheduler import Scheduler, SchedulerConfig, SpeculativeConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager, FakeModelRunner
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams


def test_a_step_reports_its_rows_and_the_prompt_tokens_that_are_left():
    scheduler, runner = (
        Scheduler(
            SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=10, max_model_len=64), FakeKVCacheManager(32, 4)
        ),
        FakeModelRunner(32, 4),
    )
    for number, num_tokens in enumerate((4, 25, 7)):
        prompt = list(range(100 * number, 100 * number + num_tokens))
        scheduler.add_request(EngineCoreRequest(f"r{number}", prompt, SamplingParams(max_tokens=3, seed=0)))
    found = []
    for _ in range(4):
        scheduled = scheduler.schedule(0.0)
        stats = scheduler.update_from_output(scheduled, runner.execute_model(scheduled), 0.0).scheduler_stats
        assert stats is not None
        assert stats.num_blocks == 32
        assert stats.num_free_blocks == scheduler.stats().num_free_blocks < 32
        found.append((
            stats.step, stats.num_running, stats.num_waiting, stats.num_scheduled_tokens, stats.num_scheduled_rows,
            stats.num_running_prefill_tokens, stats.num_waiting_prefill_tokens,
        ))  # fmt: skip
    # Two places: the third request waits until the first has its three tokens.
    assert found == [
        (1, 2, 1, 10, 2, 19, 7),
        (2, 2, 1, 10, 2, 10, 7),
        (3, 1, 1, 10, 2, 1, 7),
        (4, 2, 0, 8, 2, 0, 0),
    ]


def test_a_preempted_request_is_to_be_computed_again():
    scheduler, runner = (
        Scheduler(
            SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64), FakeKVCacheManager(6, 4)
        ),
        FakeModelRunner(6, 4),
    )
    for number in range(2):
        prompt = list(range(100 * number, 100 * number + 8))
        scheduler.add_request(EngineCoreRequest(f"r{number}", prompt, SamplingParams(max_tokens=16, seed=0)))
    while not (stats := scheduler.stats()).num_preemptions:
        scheduled = scheduler.schedule(0.0)
        scheduler.update_from_output(scheduled, runner.execute_model(scheduled), 0.0)
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.num_waiting_prefill_tokens > 8


def test_forks_and_rows_with_drafts_are_counted():
    speculative = SpeculativeConfig("ngram", 2, prompt_lookup_min=1)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, speculative=speculative),
        FakeKVCacheManager(32, 4),
    )
    params = SamplingParams(max_tokens=6, seed=0)
    scheduler.add_request(EngineCoreRequest("a", [7] * 8, params))
    scheduler.add_request(EngineCoreRequest("b", [7] * 8, params, fork_of="a"))
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(0.0)
        rows = scheduled.scheduled_requests
        output = ModelRunnerOutput([row.request_id for row in rows], [[*row.draft_token_ids, 7] for row in rows])
        scheduler.update_from_output(scheduled, output, 0.0)
    stats = scheduler.stats()
    assert (stats.num_forks, stats.num_drafts, stats.num_draft_tokens) == (1, 4, 8)
