"""Whatever is added, stepped and aborted in whatever order, the scheduler keeps its promises."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmstack_core_scheduler import RequestStatus, Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeModelRunner, next_token
from llmstack_types import EngineCoreRequest, InvalidRequestError, SamplingParams

kv_cache = pytest.importorskip("llmstack_kv_cache")


class SchedulerMachine(RuleBasedStateMachine):
    """Schedule, execute and update are rules of their own, so that adding and aborting fall in between."""

    @initialize(
        num_blocks=st.integers(2, 50),
        block_size=st.integers(1, 64),
        max_num_seqs=st.integers(1, 8),
        budget=st.integers(1, 40),
        policy=st.sampled_from(["fcfs", "priority"]),
        is_chunked=st.booleans(),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, policy, is_chunked):
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if is_chunked else 64,
            max_model_len=64,
            enable_chunked_prefill=is_chunked,
            policy=policy,
        )
        self.manager = kv_cache.KVCacheManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.config, self.manager)
        self.runner = FakeModelRunner(num_blocks, block_size)
        self.scheduled = self.output = None
        self.requests, self.answers = {}, {}

    @rule(
        number=st.integers(0, 12),
        length=st.integers(0, 64),
        shared=st.integers(0, 64),
        max_tokens=st.integers(0, 20),
        priority=st.integers(-1, 1),
    )
    def add(self, number, length, shared, max_tokens, priority):
        prompt = [1] * min(shared, length) + [number] * (length - min(shared, length))
        request = EngineCoreRequest(str(number), prompt, SamplingParams(max_tokens=max_tokens), priority=priority)
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

    @precondition(lambda self: self.scheduled is None)
    @rule()
    def schedule(self):
        oldest = self.scheduler.running.first().request_id if self.scheduler.running else None
        self.scheduled = self.scheduler.schedule(0.0)
        rows = self.scheduled.scheduled_requests
        assert len(rows) == len(self.scheduler.running) <= self.config.max_num_seqs
        assert self.scheduled.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert rows or not self.requests
        if oldest is not None:
            assert rows[0].request_id == oldest

    @precondition(lambda self: self.scheduled is not None and self.output is None)
    @rule()
    def execute(self):
        self.output = self.runner.execute_model(self.scheduled)

    @precondition(lambda self: self.output is not None)
    @rule()
    def update(self):
        outputs = self.scheduler.update_from_output(self.scheduled, self.output, 0.0).outputs
        self.scheduled = self.output = None
        for message in outputs:
            request, answer = self.requests[message.request_id], self.answers[message.request_id]
            for token_id in message.new_token_ids:
                assert token_id == next_token(request.prompt_token_ids + answer)
                answer.append(token_id)
            if message.finish_reason is not None:
                assert len(answer) == request.sampling_params.max_tokens
                del self.requests[message.request_id]

    @rule(number=st.integers(0, 12))
    def abort(self, number):
        self.scheduler.abort_requests([str(number)])
        self.requests.pop(str(number), None)

    @rule()
    def reset_prefix_cache(self):
        assert self.scheduler.reset_prefix_cache() == (not self.scheduler.running)

    @invariant()
    def every_request_is_in_one_state(self):
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        assert sorted(r.request_id for r in running + waiting) == sorted(self.requests)
        assert all(r.status is RequestStatus.RUNNING for r in running)
        assert all(r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for r in waiting)

    @invariant()
    def the_blocks_are_those_of_the_running(self):
        self.manager.check_integrity()
        held = {b for r in self.scheduler.running for b in self.manager.block_table(r.request_id)}
        assert self.manager.num_free_blocks == self.manager.num_blocks - len(held)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if self.scheduled is None and not self.scheduler.has_unfinished_requests():
                break
            if self.scheduled is None:
                self.schedule()
            elif self.output is None:
                self.execute()
            else:
                self.update()
        assert not self.requests
        assert self.runner.request_ids == []
        assert self.manager.num_free_blocks == self.manager.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
