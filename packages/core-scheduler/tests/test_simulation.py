"""500 seeded simulations over tiny pools: every answer is what the model says, however the steps were cut."""

from collections import Counter
from random import Random

import pytest

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import DecisionHash, FakeKVCacheManager, FakeModelRunner, next_token
from llmstack_types import EngineCoreRequest, FinishReason, InvalidRequestError, SamplingParams

VOCAB_SIZE = 1000


class Simulation:
    """One scheduler over one fake runner, with arrivals and aborts at any moment, all drawn from a seed."""

    def __init__(self, seed, make_manager):
        random = self.random = Random(seed)
        num_blocks, block_size = random.randint(2, 50), random.choice([1, 2, 3, 4, 7, 8, 16, 32, 64])
        self.capacity = num_blocks * block_size
        is_chunked = random.random() < 0.8
        max_model_len = random.randint(8, 150)
        self.config = SchedulerConfig(
            max_num_seqs=random.randint(1, 12),
            max_num_batched_tokens=random.randint(1, 64) if is_chunked else max_model_len + random.randint(0, 20),
            max_model_len=max_model_len,
            enable_chunked_prefill=is_chunked,
            policy=random.choice(["fcfs", "priority"]),
            long_prefill_token_threshold=random.choice([0, 0, 1, 5]) if is_chunked else 0,
        )
        self.manager = make_manager(num_blocks, block_size)
        self.scheduler = Scheduler(self.config, self.manager)
        self.runner = FakeModelRunner(num_blocks, block_size, VOCAB_SIZE)
        self.decisions = DecisionHash()
        self.log = []
        self.arrivals, self.answers, self.reasons = {}, {}, {}
        self.prefixes = [[random.randrange(VOCAB_SIZE) for _ in range(150)] for _ in range(3)]
        self.abort_rate = random.choice([0.0, 0.02, 0.1])

    def arrive(self):
        random = self.random
        length = random.randint(1, max(min(self.config.max_model_len, self.capacity) * 2 // 3, 1))
        shared = random.randint(0, length)
        prompt = random.choice(self.prefixes)[:shared]
        prompt += [random.randrange(VOCAB_SIZE) for _ in range(length - len(prompt))]
        request = EngineCoreRequest(
            request_id=str(len(self.arrivals)),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=random.randint(1, 40), min_tokens=random.randint(0, 2)),
            eos_token_ids=tuple(random.sample(range(VOCAB_SIZE), 25)),
            arrival_time_s=float(len(self.arrivals)),
            priority=random.randint(-2, 2),
        )
        self.log.append(("add", request))
        num_tokens = length + request.sampling_params.max_tokens
        can_fit = num_tokens <= self.config.max_model_len and num_tokens - 1 <= self.capacity
        try:
            self.scheduler.add_request(request)
        except InvalidRequestError:
            assert not can_fit
            return
        assert can_fit
        self.arrivals[request.request_id], self.answers[request.request_id] = request, []

    def abort_some(self):
        for request_id in list(self.arrivals):
            if request_id not in self.reasons and self.random.random() < self.abort_rate:
                self.log.append(("abort", request_id))
                self.scheduler.abort_requests([request_id, "unknown"])
                self.reasons[request_id] = FinishReason.ABORT

    def step(self):
        scheduler = self.scheduler
        oldest = scheduler.running.first() if scheduler.running else None
        scheduled = scheduler.schedule(0.0)
        self.log.append(("schedule", None))
        self.decisions.add(scheduled)
        self.check_step(scheduled, oldest)
        self.abort_some()
        output = self.runner.execute_model(scheduled)
        self.abort_some()
        self.log.append(("update", output))
        for message in scheduler.update_from_output(scheduled, output, 0.0).outputs:
            assert message.request_id not in self.reasons, "no message after the end"
            self.answers[message.request_id] += message.new_token_ids
            if message.finish_reason is not None:
                self.reasons[message.request_id] = message.finish_reason
        self.check_books()

    def check_step(self, scheduled, oldest):
        rows = scheduled.scheduled_requests
        assert scheduled.total_num_scheduled_tokens == sum(row.num_scheduled_tokens for row in rows)
        assert scheduled.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert len(rows) <= self.config.max_num_seqs
        assert max(Counter(row.request_id for row in rows).values(), default=1) == 1
        if oldest is not None:
            assert rows[0].request_id == oldest.request_id, "the oldest always advances"
        assert rows or not self.scheduler.waiting, "with work there is a step"
        assert sorted(row.request_id for row in rows) == sorted(
            request.request_id for request in self.scheduler.running
        )

    def check_books(self):
        scheduler = self.scheduler
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        alive = sorted(request_id for request_id in self.arrivals if request_id not in self.reasons)
        assert sorted(request.request_id for request in running + waiting) == alive
        for queue in (running, waiting):
            assert [request.rank for request in queue] == sorted(request.rank for request in queue)
        if hasattr(self.manager, "check_integrity"):
            self.manager.check_integrity()
            held = {block_id for request in running for block_id in self.manager.block_table(request.request_id)}
            assert self.manager.num_free_blocks + len(held) == self.manager.num_blocks

    def run(self):
        num_arrivals = self.random.randint(1, 40)
        while num_arrivals or self.scheduler.has_unfinished_requests():
            while num_arrivals and self.random.random() < 0.5:
                num_arrivals -= 1
                self.arrive()
            self.step()
            assert len(self.log) < 20_000, "the work ends"
        self.check_end()

    def check_end(self):
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.manager.reset_prefix_cache()
        assert self.runner.request_ids == []
        for request_id, request in self.arrivals.items():
            expected = expected_answer(request)
            if self.reasons[request_id] is FinishReason.ABORT:
                expected = expected[: len(self.answers[request_id])]
            assert self.answers[request_id] == expected, "the answer is the model's, whatever was preempted or shared"


def expected_answer(request):
    params, tokens = request.sampling_params, list(request.prompt_token_ids)
    answer = []
    while len(answer) < params.max_tokens:
        answer.append(next_token(tokens + answer, VOCAB_SIZE))
        if answer[-1] in request.eos_token_ids and len(answer) >= params.min_tokens:
            break
    return answer


def real_manager(num_blocks, block_size):
    return pytest.importorskip("llmstack_kv_cache").KVCacheManager(num_blocks, block_size)


@pytest.mark.parametrize("first_seed", range(0, 500, 50))
def test_every_answer_is_what_the_model_says(first_seed):
    for seed in range(first_seed, first_seed + 50):
        Simulation(seed, real_manager).run()


@pytest.mark.parametrize("seed", range(30))
def test_the_plain_manager_gives_the_same_answers(seed):
    Simulation(seed, FakeKVCacheManager).run()


@pytest.mark.parametrize("seed", range(20))
def test_a_recorded_run_replays_to_the_same_decisions_without_a_model(seed):
    original = Simulation(seed, real_manager)
    original.run()
    manager = real_manager(original.manager.num_blocks, original.manager.block_size)
    scheduler, decisions, scheduled = Scheduler(original.config, manager), DecisionHash(), None
    for name, argument in original.log:
        if name == "add":
            try:
                scheduler.add_request(argument)
            except InvalidRequestError:
                continue
        elif name == "abort":
            scheduler.abort_requests([argument, "unknown"])
        elif name == "schedule":
            scheduled = scheduler.schedule(0.0)
            decisions.add(scheduled)
        else:
            scheduler.update_from_output(scheduled, argument, 0.0)
    assert decisions.hexdigest() == original.decisions.hexdigest()


def test_the_simulations_are_messy_enough_to_mean_something():
    totals = Counter()
    for seed in range(40):
        simulation = Simulation(seed, real_manager)
        simulation.run()
        stats = simulation.scheduler.stats()
        totals += Counter(preemptions=stats.num_preemptions, hits=stats.prefix_cache_hits, steps=stats.step)
        totals += Counter(simulation.reasons.values())
    assert totals["preemptions"] > 50
    assert totals["hits"] > 500
    assert min(totals[reason] for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)) > 20
