"""Nothing that a scheduler decides by is missing from its snapshots; replays of logs show that they can be restored."""

import copy
import inspect
import random
from dataclasses import replace

import pytest
from core_scheduler_helpers.steps import make_request, step

from llmstack_core_scheduler import AlwaysSwap, Request, Scheduler, SchedulerConfig, SpeculativeConfig, snapshot
from llmstack_core_scheduler.deadline_queue import DeadlineQueue
from llmstack_core_scheduler.encoder_cache import Encoded
from llmstack_core_scheduler.encoding import Encoding
from llmstack_core_scheduler.media_numbers import MediaNumbers
from llmstack_core_scheduler.repetition import RepetitionDetector
from llmstack_core_scheduler.snapshot import new_tokens, num_snapshot_requests, restore_snapshot, take_snapshot
from llmstack_core_scheduler.tenant_turns import Tenant, TenantTurns
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import (
    EngineCoreRequest,
    MediaItem,
    MediaSpec,
    ModelRunnerOutput,
    RepetitionDetectionParams,
    SamplingParams,
)

# The configuration, what follows from the arrival of a request, and what no later decision depends on.
LEFT_OUT = {
    "_policy", "_config", "_has_windows", "_num_host_blocks", "_needs", "_prefixes", "_states",
    "_max_num_preemptions", "_has_host_blocks", "_manager", "has_source", "_max_num_step_tokens", "_smoothing",
    "_max_num_row_tokens", "quantum", "_variant", "_step_bytes", "_key_to_costs", "_max_num_drafts", "_num_rows_to_try",
    "_sessions", "_token_cost", "_draft_cost", "_follows_output",
    "_depth", "_factor", "_least_chance", "_longest", "_max_num_answers", "_max_num_tokens",
    "_owner_to_index", "_tenant_to_num_tokens", "_num_answers",  # these follow from the answers
    "_max_num_indexed_tokens", "_min_repeats", "_start", "_kv_cache_manager", "_block_size",
    "num_prompt_tokens", "min_num_tokens", "eos_token_ids", "stop_token_ids", "ending_token_ids", "is_constrained",
    "prefix_salt", "wants_logprobs", "pools_whole_prompt", "is_finished",
    "_chunks", "_results", "_spec", "_running", "_max_num_units", "_can_cut_prompts", "num_tokens", "media_end",
    "key_ids",
    "_waiting", "_has_own_budget",  # the queue of the scheduler, and whether the configuration has a budget
    "media_numbers", "_entries",  # of a part; what a cache gives one by one
    # within one step
    "_plan", "_step", "_num_left_units", "_has_encoded", "_needed", "last_step",
}  # fmt: skip
MEDIA = MediaSpec(8, {"image": 3}, max_num_tokens={"image": 6})
SPECULATIVE = SpeculativeConfig("ngram", 3, is_adaptive=True)
SUFFIX = SpeculativeConfig("suffix", 3, is_adaptive=True, suffix_decoding_max_cached_requests=2)


REPEATING = SamplingParams(
    max_tokens=30, repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=6)
)


def make(num_blocks=16, num_host_blocks=0, preemption=None, **changes):
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, **changes)
    return Scheduler(config, FakeKVCacheManager(num_blocks, 4, num_host_blocks=num_host_blocks), preemption=preemption)


def test_every_attribute_is_part_of_a_snapshot_or_left_out_on_purpose():
    scheduler = make(speculative=SPECULATIVE, policy="deadline", media=MEDIA)
    encoding = scheduler._encoding
    parts = [
        encoding, encoding.cache, encoding.numbers,
        scheduler, scheduler._preemptor, scheduler._preemptor._policy, scheduler._forking, scheduler._drafting,
        scheduler._drafting._source, scheduler._drafting._lengths,
    ]  # fmt: skip
    names = {name for part in [*parts, make(speculative=SUFFIX)._drafting._source] for name in vars(part)}
    for cls in (Request, DeadlineQueue, Tenant, TenantTurns, RepetitionDetector, Encoded):
        names.update(name for one in cls.__mro__ for name in getattr(one, "__slots__", ()))
    source = "".join(map(inspect.getsource, (snapshot, Encoding.state, Encoding.restore, Encoding.stats, MediaNumbers)))
    assert {name for name in names if name not in LEFT_OUT and name not in source} == set()


def test_a_restored_scheduler_has_the_same_snapshot():
    scheduler = make()
    scheduler.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(max_tokens=4)))
    scheduler.add_request(EngineCoreRequest("b", [1] * 20, SamplingParams(max_tokens=4)))
    scheduler.schedule(1.0)
    state, arrivals = take_snapshot(scheduler)
    assert num_snapshot_requests(scheduler) == len(arrivals) == 2
    restored = make()
    restore_snapshot(restored, state, arrivals)
    assert take_snapshot(restored) == (state, arrivals)
    assert [request.num_computed_tokens for request in restored.running] == [3, 13]


def run_step(scheduler, rng):
    """The rows of a step, of which the runner takes some drafts, and its messages; the tokens are of few kinds."""
    scheduled = scheduler.schedule(0.0)
    rows = scheduled.scheduled_requests
    sampled = [[*row.draft_token_ids[: rng.randint(0, 4)], rng.choice([7, 7, 8])] for row in rows]
    output = ModelRunnerOutput([row.request_id for row in rows], sampled)
    return rows, scheduler.update_from_output(scheduled, output, 0.0).outputs


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative": SPECULATIVE},
        {"speculative": SUFFIX},
        {"speculative": SpeculativeConfig("draft_model", 3, is_adaptive=True, model="folder")},
        {"policy": "fair", "num_blocks": 12, "fair_quantum": 8},
        {"num_blocks": 12, "num_host_blocks": 20, "preemption": AlwaysSwap()},
    ],
)
def test_a_restored_scheduler_decides_what_the_one_before_it_decides(settings):
    scheduler, rng = make(**settings), random.Random(1)
    for number in range(8):
        arrival = EngineCoreRequest(str(number), [7] * rng.randint(1, 12), REPEATING, tenant="ab"[number % 2])
        scheduler.add_request(arrival)
    for seed in range(12):
        run_step(scheduler, rng)
        state, arrivals = take_snapshot(scheduler)
        restored = make(**settings)
        restored._kv_cache_manager.__dict__.update(copy.deepcopy(scheduler.kv_cache_manager.__dict__))
        restore_snapshot(restored, state, arrivals)
        assert take_snapshot(restored) == (state, arrivals)
        texts = {request.request_id: list(request.token_ids) for request in restored._requests.values()}
        assert [texts[one.request_id][len(one.prompt_token_ids) :] for one in arrivals] == list(new_tokens(state))
        ahead = copy.deepcopy(scheduler)
        for number in range(5):
            one, other = random.Random(seed + number), random.Random(seed + number)
            assert run_step(restored, one) == run_step(ahead, other)


def test_rows_of_requests_that_have_ended_stay_under_way_in_a_snapshot():
    scheduler = make()
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 4, max_tokens=3))
    scheduled = scheduler.schedule(0.0)
    scheduler.abort_requests(["a"])
    restored = make()
    restore_snapshot(restored, *take_snapshot(scheduler))
    assert take_snapshot(restored) == take_snapshot(scheduler)
    output = ModelRunnerOutput(["a", "b"], [[7], [7]])
    messages = restored.update_from_output(scheduled, output, 0.0).outputs
    assert [(one.request_id, one.new_token_ids) for one in messages] == [("b", [7])]


@pytest.mark.parametrize("policy", ["fair", "deadline"])
def test_tokens_and_shares_of_tenants_are_restored(policy):
    scheduler = make(policy=policy)
    for number in range(9):  # more than run at once
        scheduler.add_request(make_request(str(number), 4, max_tokens=3, tenant="abc"[number % 3]))
    for _ in range(4):
        step(scheduler)
        restored = make(policy=policy)
        restore_snapshot(restored, *take_snapshot(scheduler))
        assert take_snapshot(restored) == take_snapshot(scheduler)
        tokens, expected = ([request.token_ids for request in one.running] for one in (restored, scheduler))
        assert tokens == expected
        order = [[request.request_id for request in one.waiting] for one in (restored, scheduler)]
        assert order[0] == order[1]


def test_a_snapshot_that_is_none_is_refused():
    state, _ = take_snapshot(make())
    with pytest.raises(ValueError, match="no snapshot of a scheduler"):
        restore_snapshot(make(), {name: value for name, value in state.items() if name != "queue"}, [])


def test_a_scheduler_with_a_source_of_drafts_of_its_own_has_no_snapshots():
    config = SchedulerConfig(max_num_batched_tokens=64, max_model_len=64)
    scheduler = Scheduler(config, FakeKVCacheManager(16, 4), draft_source=object())
    with pytest.raises(ValueError, match="no snapshots of a object"):
        take_snapshot(scheduler)


def test_a_restored_scheduler_goes_on_with_an_item_that_is_begun():
    settings = {"media": MEDIA, "encoder_budget_units": 1}
    scheduler = make(**settings)
    item = MediaItem(bytes(32), "image", 2, 4, num_units=30)
    for name in "abc":
        media = () if name == "a" else (replace(item, digest=name.encode() * 32),)
        scheduler.add_request(EngineCoreRequest(name, [7] * 9, SamplingParams(max_tokens=6), media=media))
    rng = random.Random(2)
    for seed in range(8):
        run_step(scheduler, rng)
        state, arrivals = take_snapshot(scheduler)
        restored = make(**settings)
        restored._kv_cache_manager.__dict__.update(copy.deepcopy(scheduler.kv_cache_manager.__dict__))
        restore_snapshot(restored, state, arrivals)
        assert take_snapshot(restored) == (state, arrivals)
        ahead = copy.deepcopy(scheduler)
        for number in range(4):
            one, other = random.Random(seed + number), random.Random(seed + number)
            assert run_step(restored, one) == run_step(ahead, other)
        assert take_snapshot(restored) == take_snapshot(ahead)
