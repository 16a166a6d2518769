"""A cache manager may refuse blocks though enough are free: the request waits, and nothing leaks."""

import pytest

from llmstack_core_scheduler import AlwaysSwap, CheapestPreemption, RequestStatus, Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager, FakeModelRunner, next_token
from llmstack_core_scheduler.waiting_queue import WaitingQueue
from llmstack_types import EngineCoreRequest, SamplingParams

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
    text = [1] * 8 + rig.answers["a"]
    child = EngineCoreRequest("child", [*text[:-1], 7], SamplingParams(max_tokens=1))
    while rig.manager.num_free_blocks < 1 or not rig.scheduler.fork_request("a", child):
        rig.step()
    rig.scheduler.abort_requests("a")
    scheduled = rig.step()
    assert scheduled.block_copies
    assert not scheduled.swap_ins
    assert swapped.status is RequestStatus.SWAPPED
    assert rig.step().swap_ins
    rig.finish()


def test_a_smoothing_above_one_is_refused():
    with pytest.raises(ValueError, match=r"smoothing must be at most 1, got 1\.5"):
        CheapestPreemption(smoothing=1.5)


def test_tenants_of_a_queue_without_shares_do_not_matter():
    queue = WaitingQueue(1)
    assert queue.update_tenants() == queue.tenants
