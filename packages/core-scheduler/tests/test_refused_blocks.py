"""A cache manager may refuse blocks though enough are free: the request waits, and nothing leaks."""

import pytest

from llmstack_core_scheduler import AlwaysSwap, CheapestPreemption, RequestStatus, Scheduler, SchedulerConfig
from llmstack_core_scheduler.allocation_plan import plan_allocation
from llmstack_core_scheduler.block_needs import BlockNeeds
from llmstack_core_scheduler.drafting import Drafting
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.starvation_guard import leaves_room_for_protected
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_core_scheduler.testing import FakeKVCacheManager, FakeModelRunner, next_token
from llmstack_core_scheduler.waiting_queue import WaitingQueue
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams

PROMPT = list(range(100, 110))


class Refusing(FakeKVCacheManager):
    """Refuses the first calls of one method that are about one request."""

    def __init__(self, *args, refuses=(), times=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.refuses, self.times = refuses, times

    def _refuse(self, method, request_id):
        if (method, request_id) != self.refuses or not self.times:
            return False
        self.times -= 1
        return True

    def get_computed_blocks(self, request_id, token_ids, salt=""):
        return [], 0  # so that a fork alone shares blocks

    def fork(self, parent_id, child_id, num_tokens):
        return None if self._refuse("fork", child_id) else super().fork(parent_id, child_id, num_tokens)

    def allocate_slots(self, request_id, num_tokens, computed_block_ids=(), salt=""):
        if self._refuse("allocate_slots", request_id):
            return None
        return super().allocate_slots(request_id, num_tokens, computed_block_ids, salt)

    def swap_in(self, request_id):
        return None if self._refuse("swap_in", request_id) else super().swap_in(request_id)

    def keeps_prefix(self, request_id, num_tokens):
        return not self._refuse("keeps_prefix", request_id)


class Rig:
    def __init__(self, manager, **config):
        self.manager = manager
        limits = {"max_num_batched_tokens": 64, "max_model_len": 64}
        self.scheduler = Scheduler(SchedulerConfig(**(limits | config)), manager, preemption=AlwaysSwap())
        self.runner = FakeModelRunner(manager.num_blocks, manager.block_size, num_host_blocks=manager.num_host_blocks)
        self.answers = {}

    def add(self, request_id, prompt=PROMPT, max_tokens=6, **kwargs):
        params = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add_request(EngineCoreRequest(request_id, prompt, params, **kwargs))

    def step(self):
        scheduled = self.scheduler.schedule(0.0)
        output = self.scheduler.update_from_output(scheduled, self.runner.execute_model(scheduled), 0.0)
        for message in output.outputs:
            self.answers.setdefault(message.request_id, []).extend(message.new_token_ids)
        return scheduled

    def finish(self):
        while self.scheduler.has_unfinished_requests():
            self.step()
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.manager.num_free_host_blocks == self.manager.num_host_blocks


def continuation(token_ids, num_tokens):
    text = list(token_ids)
    for _ in range(num_tokens):
        text.append(next_token(text))
    return text[len(token_ids) :]


@pytest.mark.parametrize("method", ["fork", "allocate_slots"])
def test_a_completion_that_is_refused_the_blocks_of_its_prompt_begins_a_step_later(method):
    rig = Rig(Refusing(30, 4, refuses=(method, "b")))
    rig.add("a")
    rig.add("b", fork_of="a")
    rig.step()
    assert [request.request_id for request in rig.scheduler.running] == ["a"]
    assert rig.manager.num_held_blocks("b") == 0
    rig.finish()
    assert rig.answers["a"] == rig.answers["b"] == continuation(PROMPT, 6)


def test_a_beam_whose_parent_keeps_too_little_waits_and_computes():
    rig = Rig(Refusing(30, 4, refuses=("keeps_prefix", "parent")))
    rig.add("parent")
    rig.step()
    child = EngineCoreRequest("child", [*PROMPT, 7], SamplingParams(max_tokens=3))
    assert rig.scheduler.fork_request("parent", child) == 0
    rig.finish()
    assert rig.answers["child"] == continuation([*PROMPT, 7], 3)


def test_a_beam_of_a_beam_that_the_runner_does_not_know_shares_full_blocks_only():
    rig = Rig(Refusing(30, 4))
    rig.add("parent")
    rig.step()
    rig.step()
    text = PROMPT + rig.answers["parent"]
    child = EngineCoreRequest("child", [*text[:-1], 7], SamplingParams(max_tokens=3))
    grandchild = EngineCoreRequest("grandchild", [*text[:-1], 8], SamplingParams(max_tokens=3))
    assert rig.scheduler.fork_request("parent", child) == 11
    assert rig.scheduler.fork_request("child", grandchild) == 8
    rig.finish()
    assert rig.answers["child"] == continuation([*text[:-1], 7], 3)
    assert rig.answers["grandchild"] == continuation([*text[:-1], 8], 3)


def swapped_rig(refuses=()):
    """Four blocks for two requests, of which the second is swapped out."""
    rig = Rig(Refusing(6, 4, num_host_blocks=8, refuses=refuses), max_model_len=24)
    rig.add("a", [1] * 8, max_tokens=12)
    rig.add("b", [2] * 8, max_tokens=6)
    while not rig.scheduler.stats().num_swapped:
        rig.step()
    return rig


def test_a_swapped_request_that_is_refused_its_blocks_stays_on_the_host():
    rig = swapped_rig(refuses=("swap_in", "b"))
    while rig.manager.times:
        rig.step()
    assert rig.scheduler.stats().num_swapped == 1
    rig.finish()
    assert rig.answers["b"] == continuation([2] * 8, 6)


def test_a_request_is_not_swapped_in_in_a_step_that_copies_blocks():
    rig = swapped_rig()
    (swapped,) = [request for request in rig.scheduler.waiting if request.status is RequestStatus.SWAPPED]
    config = SchedulerConfig(max_model_len=24)
    plan = StepPlan(config, 1)
    plan.block_copies.append((0, 1))
    num_free_blocks = rig.manager.num_free_blocks
    allocation = plan_allocation(swapped, rig.manager, BlockNeeds(config, rig.manager), plan)
    assert allocation.allocate(swapped.num_tokens, plan) is None
    assert (plan.swap_ins, rig.manager.num_free_blocks) == ([], num_free_blocks)
    assert plan.num_tokens_before(swapped) == swapped.num_computed_tokens, "it has no row"
    rig.finish()


def test_a_swapped_request_gives_up_what_its_windows_have_passed_before_it_takes_more():
    kv_cache = pytest.importorskip("llmstack_kv_cache")
    groups = [kv_cache.KVCacheGroup("full"), kv_cache.KVCacheGroup("window", sliding_window=1)]
    manager = kv_cache.KVCacheManager(9, 1, num_host_blocks=8, groups=groups)  # one of them is the null block
    request = Request(EngineCoreRequest("a", [1, 2, 3, 4], SamplingParams(max_tokens=4)), (0,), 8)
    manager.allocate_slots("a", 4)
    request.num_computed_tokens = 4  # by a step that is under way when the request is swapped out
    manager.swap_out("a")
    request.swap_out()
    request.token_ids.append(5)
    request.num_tokens = 5
    config = SchedulerConfig(max_num_batched_tokens=4, max_model_len=8)
    plan = StepPlan(config, 0)
    allocation = plan_allocation(request, manager, BlockNeeds(config, manager), plan)
    assert allocation.num_needed_blocks <= manager.num_free_blocks == 8
    block_ids = allocation.allocate(5, plan)
    assert len(plan.swap_ins) == 8
    assert len(block_ids) == 5 * len(groups)
    assert manager.block_tables("a")[1][:3] == [0, 0, 0]
    manager.check_integrity()


def test_without_a_source_there_are_no_drafts():
    drafting = Drafting(None, SchedulerConfig(), FakeKVCacheManager(8, 4))
    plan = StepPlan(SchedulerConfig(), 1)
    drafting.extend(plan)
    assert (drafting.num_drafts, drafting.has_source) == (0, False)


class Guesses:
    def propose(self, request_id, token_ids, max_num_tokens, owner):
        return [5, 6, 7]

    def learn(self, owner, token_ids):
        pass

    def forget(self, request_id):
        pass


def drafted(max_tokens):
    """A scheduler with drafts, and its first step for one request."""
    config = SchedulerConfig(max_num_batched_tokens=16, max_model_len=64, num_lookahead_slots=3)
    scheduler = Scheduler(config, FakeKVCacheManager(20, 4), draft_source=Guesses())
    scheduler.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(max_tokens=max_tokens)))
    return scheduler, scheduler.schedule(0.0)


def test_a_row_that_samples_its_last_token_gets_no_drafts():
    _, scheduled = drafted(max_tokens=1)
    (row,) = scheduled.scheduled_requests
    assert list(row.draft_token_ids) == []


def test_a_row_that_was_preempted_meanwhile_keeps_its_drafts_but_not_its_slots():
    scheduler, scheduled = drafted(max_tokens=20)
    (request,) = scheduler.running
    scheduler._preempt(request, StepPlan(SchedulerConfig(), 1))
    request.recompute_step = scheduled.step
    num_computed_tokens = request.num_computed_tokens
    output = ModelRunnerOutput(["a"], [[5, 6, 9]])
    (message,) = scheduler.update_from_output(scheduled, output, 0.0).outputs
    assert message.new_token_ids == [5, 6, 9]
    assert request.num_tokens == 6
    assert request.num_computed_tokens == num_computed_tokens
    assert scheduler.stats().num_accepted_draft_tokens == 2


def test_a_source_without_slots_for_drafts_is_not_asked():
    scheduler = Scheduler(SchedulerConfig(max_model_len=64), FakeKVCacheManager(20, 4), draft_source=Guesses())
    scheduler.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(max_tokens=9)))
    (row,) = scheduler.schedule(0.0).scheduled_requests
    assert list(row.draft_token_ids) == []


def test_a_row_with_one_token_to_come_gets_no_drafts():
    scheduler, scheduled = drafted(max_tokens=2)
    scheduler.update_from_output(scheduled, ModelRunnerOutput(["a"], [[9]]), 0.0)
    (row,) = scheduler.schedule(0.0).scheduled_requests
    assert list(row.draft_token_ids) == []


def test_a_beam_that_is_preempted_before_the_runner_knows_it_is_not_removed_from_it():
    rig = Rig(Refusing(30, 4))
    rig.add("parent")
    rig.step()
    child = EngineCoreRequest("child", [*PROMPT, 7], SamplingParams(max_tokens=3))
    assert rig.scheduler.fork_request("parent", child) == 10
    plan = StepPlan(SchedulerConfig(), 2)
    rig.scheduler._preempt(rig.scheduler.running.last(), plan)
    assert plan.preempted_request_ids == []
    rig.finish()
    assert rig.answers["child"] == continuation([*PROMPT, 7], 3)


def test_a_beam_that_begins_otherwise_than_its_parent_shares_what_is_common():
    rig = Rig(Refusing(30, 4))
    rig.add("parent")
    rig.step()
    child = EngineCoreRequest("child", [*PROMPT[:6], 7, 7, 7, 7], SamplingParams(max_tokens=3))
    assert rig.scheduler.fork_request("parent", child) == 6
    rig.finish()
    assert rig.answers["child"] == continuation([*PROMPT[:6], 7, 7, 7, 7], 3)


def test_a_request_before_all_protected_ones_needs_no_room_for_them():
    rig = swapped_rig()
    (swapped,) = [request for request in rig.scheduler.waiting if request.status is RequestStatus.SWAPPED]
    config = SchedulerConfig(max_model_len=24)
    assert leaves_room_for_protected(swapped, [], 0, BlockNeeds(config, rig.manager))
    rig.finish()


def test_what_a_window_has_passed_is_freed_before_the_step():
    class Windowed(Refusing):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.has_windows = True
            self.advanced = []

        def advance(self, request_id, num_computed_tokens):
            self.advanced.append((request_id, num_computed_tokens))
            return num_computed_tokens + 4

    rig = Rig(Windowed(30, 4))
    rig.add("a", max_tokens=12)
    rig.finish()
    # It is asked again only after as many tokens as it said.
    assert rig.manager.advanced == [("a", 10), ("a", 14), ("a", 18)]


def test_a_smoothing_above_one_is_refused():
    with pytest.raises(ValueError, match=r"smoothing must be at most 1, got 1\.5"):
        CheapestPreemption(smoothing=1.5)


def test_tenants_of_a_queue_without_shares_do_not_matter():
    queue = WaitingQueue(1)
    assert queue.update_tenants() == queue.tenants
