"""Distinct adapters are a capacity of each step, which waiting requests share fairly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.adapter_places import MAX_NUM_OVERTAKERS
from llmstack_core_scheduler.request import prefix_salt
from llmstack_core_scheduler.testing import FakeKVCacheManager, FakeModelRunner
from llmstack_types import EngineCoreRequest, SamplingParams


class Rig:
    def __init__(self, max_loras=2, policy="fcfs", num_blocks=60, **config):
        self.manager = FakeKVCacheManager(num_blocks, 4)
        limits = {"max_num_batched_tokens": 64, "max_model_len": 64, "max_num_seqs": 8} | config
        self.scheduler = Scheduler(SchedulerConfig(max_loras=max_loras, policy=policy, **limits), self.manager)
        self.runner = FakeModelRunner(num_blocks, 4)
        self.adapters = {}
        self.ended = []
        self.most = 0
        self.num_found_tokens = {}

    def add(self, request_id, adapter=None, max_tokens=3, **fields):
        self.adapters[request_id] = adapter
        fields = {
            "prompt_token_ids": [1, 2, 3, 4, 5],
            "sampling_params": SamplingParams(max_tokens=max_tokens),
        } | fields
        self.scheduler.add_request(EngineCoreRequest(request_id, lora_name=adapter, **fields))

    def step(self):
        scheduled = self.scheduler.schedule(0.0)
        rows = [row.request_id for row in scheduled.scheduled_requests]
        for row in scheduled.scheduled_requests:
            self.num_found_tokens.setdefault(row.request_id, row.num_computed_tokens)
        self.most = max(self.most, len({self.adapters[row] for row in rows} - {None}))
        outputs = self.scheduler.update_from_output(scheduled, self.runner.execute_model(scheduled), 0.0).outputs
        self.ended += [output.request_id for output in outputs if output.finish_reason is not None]
        return rows

    def finish(self):
        while self.scheduler.has_unfinished_requests():
            self.step()


def test_a_step_has_at_most_so_many_adapters_and_others_overtake():
    rig = Rig(max_loras=2)
    for request_id, adapter in (("a", "A"), ("b", "B"), ("c", "C"), ("base", None), ("a2", "A")):
        rig.add(request_id, adapter)
    assert rig.step() == ["a", "b", "base", "a2"]
    rig.finish()
    assert rig.most == 2
    assert rig.ended[-1] == "c"


def test_a_rare_adapter_is_overtaken_only_so_often():
    rig = Rig(max_loras=1, max_num_seqs=2)
    rig.add("first", "A")
    rig.add("rare", "B")
    for number in range(3 * MAX_NUM_OVERTAKERS):
        rig.add(f"{number}", "A")
    rig.finish()
    assert rig.ended.index("rare") <= MAX_NUM_OVERTAKERS + 2
    assert rig.most == 1


def test_without_a_limit_adapters_are_not_counted():
    rig = Rig(max_loras=0)
    for number in range(5):
        rig.add(f"{number}", f"adapter {number}")
    assert len(rig.step()) == 5
    with pytest.raises(ValueError, match="max_loras must be at least 0"):
        SchedulerConfig(max_loras=-1)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([None, "A", "B", "C", "D"]), st.integers(1, 6)), min_size=1, max_size=24
    ),
    max_loras=st.integers(1, 3),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    num_blocks=st.integers(6, 40),
)
def test_every_request_ends_within_the_limit_under_any_policy(requests, max_loras, policy, num_blocks):
    rig = Rig(max_loras, policy, num_blocks)
    for number, (adapter, max_tokens) in enumerate(requests):
        rig.add(f"{number}", adapter, max_tokens, tenant=f"{number % 3}", priority=number % 2)
    for _ in range(100 * len(requests)):
        if not rig.scheduler.has_unfinished_requests():
            break
        rig.step()
    assert sorted(rig.ended) == sorted(rig.adapters)
    assert rig.most <= max_loras


def test_no_adapter_finds_what_another_or_the_base_model_has_computed():
    rig = Rig()
    for request_id, adapter in (("base", None), ("a", "A@1.1"), ("again", "A@1.2"), ("b", "B@1.1"), ("hit", "A@1.1")):
        rig.add(request_id, adapter, prompt_token_ids=list(range(12)))
        rig.finish()
        assert rig.num_found_tokens[request_id] == (8 if request_id == "hit" else 0), request_id


@given(one=st.tuples(st.text(), st.none() | st.text("ab@.1", min_size=1)), other=st.tuples(st.text(), st.none()))
def test_equal_salts_mean_equal_adapters_and_salts(one, other):
    crafted = ("\x01" + (one[1] or "") + "\x01" + one[0], None)
    for pair in (other, crafted):
        if pair != one:
            assert prefix_salt(*pair) != prefix_salt(*one)
