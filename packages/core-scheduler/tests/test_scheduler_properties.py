"""Whatever is added, stepped and aborted in whatever order, the scheduler keeps its invariants."""

import pytest
from core_scheduler_helpers.places import Places, Yields, wrong_counts
from core_scheduler_helpers.stepped_machine import SteppedMachine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from llmstack_core_scheduler import AlwaysSwap, RequestStatus, Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeModelRunner, next_token
from llmstack_types import EngineCoreRequest, InvalidRequestError, SamplingParams

kv_cache = pytest.importorskip("llmstack_kv_cache")


class SometimesRight:
    def learn(self, owner, token_ids):
        pass

    def forget(self, request_id):
        pass

    def propose(self, request_id, token_ids, max_num_tokens, owner):
        right = next_token(token_ids)
        return [right, right, right] if token_ids[-1] % 2 else [right, next_token([*token_ids, right])]


class SchedulerMachine(SteppedMachine):
    @initialize(
        num_blocks=st.integers(2, 50),
        block_size=st.integers(1, 64),
        max_num_seqs=st.integers(1, 8),
        budget=st.integers(1, 40),
        policy=st.sampled_from(["fcfs", "priority", "fair", "fair", "deadline"]),
        is_chunked=st.booleans(),
        num_host_blocks=st.sampled_from([0, 3, 100]),
        num_lookahead_slots=st.sampled_from([0, 3]),
        max_num_preemptions=st.integers(1, 4),
        max_prefill_tokens=st.sampled_from([0, 1, 12]),
        has_turns=st.booleans(),
    )
    def start(
        self, num_blocks, block_size, max_num_seqs, budget, policy, is_chunked, num_host_blocks, num_lookahead_slots,
        max_num_preemptions, max_prefill_tokens, has_turns,
    ):  # fmt: skip
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if is_chunked else 64,
            max_model_len=64,
            enable_chunked_prefill=is_chunked,
            policy=policy,
            num_lookahead_slots=num_lookahead_slots,
            max_num_preemptions=max_num_preemptions,
            max_num_partial_prefills=1,
            max_prefill_tokens=max_prefill_tokens,
            shorter_prompts_first=has_turns and is_chunked and policy in ("fcfs", "fair"),
        )
        self.num_host_blocks = num_host_blocks
        self.manager = kv_cache.KVCacheManager(num_blocks, block_size, num_host_blocks=num_host_blocks)
        self.yields = Yields()
        self.scheduler = Scheduler(
            self.config, self.manager, preemption=AlwaysSwap(), draft_source=SometimesRight(), on_status=self.yields
        )
        self.runner = FakeModelRunner(num_blocks, block_size, num_host_blocks=num_host_blocks)
        self.under_way = []
        self.requests, self.answers = {}, {}

    @rule(
        number=st.integers(0, 12),
        length=st.integers(0, 64),
        shared=st.integers(0, 64),
        max_tokens=st.integers(0, 20),
        priority=st.integers(-1, 1),
        fork_of=st.sampled_from(["", "", "0", "1"]),
        tenant=st.sampled_from("aaab"),
    )
    def add(self, number, length, shared, max_tokens, priority, fork_of, tenant):
        prompt = [1] * min(shared, length) + [number] * (length - min(shared, length))
        if fork_of in self.requests:
            prompt = list(self.requests[fork_of].prompt_token_ids)
            length = len(prompt)
        request = EngineCoreRequest(
            str(number), prompt, SamplingParams(max_tokens=max_tokens), priority=priority, fork_of=fork_of,
            tenant=tenant,
        )  # fmt: skip
        capacity = self.manager.num_blocks * self.manager.block_size
        fits = length + max_tokens <= 64 and max(length, length + max_tokens - 1) <= capacity
        before = [r.request_id for r in self.scheduler.waiting]
        try:
            self.scheduler.add_request(request)
        except InvalidRequestError:
            assert request.request_id in self.requests or not fits or not length
            assert [r.request_id for r in self.scheduler.waiting] == before
            return
        assert fits
        assert length
        assert request.request_id not in self.requests
        self.requests[request.request_id], self.answers[request.request_id] = request, []

    @rule(
        number=st.integers(13, 25),
        token_id=st.integers(0, 9),
        max_tokens=st.integers(0, 9),
        is_parent_dropped=st.booleans(),
        data=st.data(),
    )
    def fork(self, number, token_id, max_tokens, is_parent_dropped, data):
        if not self.scheduler.running or str(number) in self.requests:
            return
        parent = data.draw(st.sampled_from(self.scheduler.running.requests))
        prompt = [*parent.token_ids, token_id]
        child = EngineCoreRequest(str(number), prompt, SamplingParams(max_tokens=max_tokens))
        before = self.scheduler.stats()
        try:
            num_tokens = self.scheduler.fork_request(parent.request_id, child)
        except InvalidRequestError:
            assert self.scheduler.stats() == before
            return
        assert num_tokens <= len(prompt) - 1
        self.requests[str(number)], self.answers[str(number)] = child, []
        if is_parent_dropped:
            self.abort(parent.request_id)

    @precondition(lambda self: len(self.under_way) < 2)
    @rule()
    def schedule(self):
        oldest = self.scheduler.running.first().request_id if self.scheduler.running else None
        places = Places.before(self.scheduler, self.config.max_num_rows)
        scheduled = self.scheduler.schedule(0.0)
        assert not places.broken_rule(self.yields.take())
        rows = scheduled.scheduled_requests
        assert len(rows) <= len(self.scheduler.running) <= self.config.max_num_seqs
        assert scheduled.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        if not self.under_way:
            assert len(rows) == len(self.scheduler.running)
            assert rows or not self.requests
            if oldest is not None:
                assert rows[0].request_id == oldest
        self.under_way.append((scheduled, self.runner.execute_model(scheduled)))

    @invariant()
    def every_status_is_that_of_its_queue(self):
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        assert all(r.status is RequestStatus.RUNNING for r in running)
        states = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED, RequestStatus.YIELDED)
        assert all(r.status in states for r in waiting)
        assert all(r.num_preemptions <= self.config.max_num_preemptions for r in running + waiting)

    @invariant()
    def the_rows_of_each_tenant_are_counted(self):
        assert not wrong_counts(self.scheduler)

    @invariant()
    def the_blocks_are_those_of_the_running(self):
        self.manager.check_integrity()
        held = {b for r in self.scheduler.running for b in self.manager.block_table(r.request_id)}
        assert self.manager.num_free_blocks == self.manager.num_blocks - len(held)

    def teardown(self):
        super().teardown()
        if hasattr(self, "scheduler"):
            assert self.manager.num_free_host_blocks == self.num_host_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
