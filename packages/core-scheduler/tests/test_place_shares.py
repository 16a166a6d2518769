"""Shares of places: a key that holds more than its share yields rows to the waiting requests of others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from core_scheduler_helpers.places import Places, Yields, wrong_counts
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.snapshot import restore_snapshot, take_snapshot
from llmstack_core_scheduler.testing import DecisionHash, FakeModelRunner, next_token
from llmstack_types import EngineCoreRequest, SamplingParams

kv_cache = pytest.importorskip("llmstack_kv_cache")

BLOCK_SIZE = 4


@dataclass
class Server:
    """A scheduler and a model runner. It checks the rules of places in each step, and each answer.

    Attributes:
        begun: The step in which each request got its first token.
        ended: The step in which each request ended.
        num_recomputed: Of each row that went on after it had yielded, the tokens that were computed again.
    """

    num_places: int
    policy: str = "fair"
    num_tokens: int = 4096
    num_blocks: int = 20_000
    num_ahead: int = 0
    windows: tuple[int | None, ...] = (None,)
    now: int = 0
    num_yields: int = 0
    begun: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    num_recomputed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.yields, self.decisions = Yields(), DecisionHash()
        self.scheduler = self.make_scheduler()
        self.runner = FakeModelRunner(self.num_blocks, BLOCK_SIZE, sliding_windows=self.windows)
        self.under_way = []

    def make_scheduler(self) -> Scheduler:
        config = SchedulerConfig(
            max_num_seqs=self.num_places, max_num_batched_tokens=self.num_tokens, max_model_len=2048, policy=self.policy
        )
        if self.windows == (None,):
            manager = kv_cache.KVCacheManager(self.num_blocks, BLOCK_SIZE)
        else:
            groups = [kv_cache.KVCacheGroup(str(number), window) for number, window in enumerate(self.windows)]
            manager = kv_cache.KVCacheManager(self.num_blocks, BLOCK_SIZE, groups=groups)
        return Scheduler(config, manager, on_status=self.yields)

    def add(self, tenant: str, num_requests: int = 1, num_prompt: int = 6, max_tokens: int = 50) -> list[str]:
        names = [f"{tenant}{len(self.prompts) + number}" for number in range(num_requests)]
        for name in names:
            self.prompts[name], self.answers[name] = [len(self.prompts), 7, *range(num_prompt - 2)], []
            params = SamplingParams(max_tokens=max_tokens)
            self.scheduler.add_request(EngineCoreRequest(name, self.prompts[name], params, tenant=tenant))
        return names

    def step(self) -> None:
        self.now += 1
        places = Places.before(self.scheduler, self.num_places)
        scheduled = self.scheduler.schedule(float(self.now))
        self.decisions.add(scheduled)
        yielded = self.yields.take()
        assert not (rule := places.broken_rule(yielded)), rule
        self.num_yields += len(yielded)
        computed = {row.request_id: row.num_computed_tokens for row in scheduled.scheduled_requests}
        for request in scheduled.new_requests:
            if len(request.token_ids) > request.num_prompt_tokens:  # its last token was not computed before either
                self.num_recomputed.append(len(request.token_ids) - 1 - computed[request.request_id])
        self.under_way.append((scheduled, self.runner.execute_model(scheduled)))
        while len(self.under_way) > (self.num_ahead if scheduled.scheduled_requests else 0):
            self.land(*self.under_way.pop(0))
        assert not wrong_counts(self.scheduler)

    def land(self, scheduled, output) -> None:
        for message in self.scheduler.update_from_output(scheduled, output, float(self.now)).outputs:
            name, answer = message.request_id, self.answers[message.request_id]
            self.begun.setdefault(name, self.now)
            for token_id in message.new_token_ids:
                assert token_id == next_token(self.prompts[name] + answer)
                answer.append(token_id)
            if message.finish_reason is not None:
                self.ended[name] = self.now

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def run(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()
            assert self.now < 20_000

    def num_running(self) -> Counter[str]:
        return Counter(request.arrival.tenant for request in self.scheduler.running)

    def steps_to_first_token(self, name: str) -> int:
        sent = self.now
        while name not in self.begun:
            self.step()
        return self.begun[name] - sent


def test_a_short_request_beside_600_of_another_key_begins_as_where_that_key_has_half_the_places():
    full, half = Server(256), Server(256)
    full.add("a", 600, max_tokens=200)
    half.add("a", 128, max_tokens=200)
    num_steps = {}
    for name, server in (("full", full), ("half", half)):
        server.steps(20)
        (request,) = server.add("b", max_tokens=5)
        num_steps[name] = server.steps_to_first_token(request)
    assert num_steps == {"full": 1, "half": 1}
    assert full.num_running() == {"a": 255, "b": 1}


def test_under_fcfs_a_short_request_waits_for_the_end_of_those_before_it():
    server = Server(32, policy="fcfs")
    server.add("a", 75, max_tokens=200)
    server.steps(20)
    (request,) = server.add("b", max_tokens=5)
    assert server.steps_to_first_token(request) > 180


def test_a_key_with_many_requests_reaches_its_share_by_an_eighth_a_step_and_then_no_row_yields():
    server = Server(64)
    server.add("a", 200, max_tokens=500)
    server.steps(10)
    server.add("b", 200, max_tokens=500)
    counts = []
    for _ in range(30):
        server.step()
        counts.append(server.num_running()["b"])
    assert counts == [8, 16, 24, *[32] * 27]
    assert server.num_yields == 32
    assert server.num_running() == {"a": 32, "b": 32}


def test_a_place_that_becomes_free_goes_to_the_key_below_its_share_though_rows_of_the_other_wait():
    server = Server(4)
    server.add("a", 6, max_tokens=60)
    server.steps(3)
    names = server.add("b", 6, max_tokens=4)
    while not all(name in server.begun for name in names):
        server.step()
    assert server.num_running() == {"a": 2, "b": 2}
    assert server.num_yields == 2  # these two places served all six


def test_places_that_no_other_key_wants_are_not_limited():
    server = Server(8)
    server.add("b", 1, max_tokens=300)
    server.add("a", 40, max_tokens=20)
    server.step()
    assert server.num_running() == {"a": 7, "b": 1}
    server.run()
    assert not server.num_yields


@pytest.mark.parametrize("num_places", [1, 2, 7, 8, 9, 100])
def test_a_key_alone_is_never_limited(num_places):
    server, other = Server(num_places), Server(num_places, policy="fcfs")
    for one in (server, other):
        one.add("a", 3 * num_places, max_tokens=9)
        one.run()
    assert server.decisions.hexdigest() == other.decisions.hexdigest()
    assert not server.num_yields


def test_more_keys_than_places_take_turns_of_one_place_each():
    server = Server(4)
    server.add("a", 12, max_tokens=400)
    server.steps(3)
    names = [server.add(tenant, max_tokens=5)[0] for tenant in "bcdefghi"]
    while not all(name in server.ended for name in names):
        server.step()
        assert server.num_running()["a"] >= 1
    # A row yields per step. Eight requests of five tokens need 14 steps of three places.
    assert server.now <= 3 + 3 + 15


@pytest.mark.parametrize("windows", [(None,), (None, 8), (None, 8, 8, 8)])
def test_a_row_that_yields_keeps_its_cache(windows):
    server = Server(16, windows=windows)
    server.add("a", 40, num_prompt=50, max_tokens=60)
    server.steps(25)
    server.add("b", 8, max_tokens=4)
    server.run()
    assert server.num_yields >= 2
    assert len(server.num_recomputed) == server.num_yields
    assert max(server.num_recomputed) < BLOCK_SIZE  # those of a block that was not full


def test_a_row_yields_while_the_step_before_still_samples_its_token():
    server = Server(8, num_ahead=1)
    server.add("a", 20, max_tokens=30)
    server.steps(5)
    server.add("b", 3, max_tokens=4)
    server.run()
    assert server.num_yields == 3  # and `land` has compared every answer with the model's


def test_no_more_places_are_made_than_the_step_has_tokens_for():
    server = Server(32, num_tokens=100)
    server.add("a", 60, max_tokens=300)
    server.steps(60)
    server.add("b", 4, num_prompt=500, max_tokens=4)
    server.step()
    assert server.num_running() == {"a": 31, "b": 1}
    server.steps(4)
    assert server.num_yields == 1


KEYS = st.lists(
    st.tuples(
        st.integers(0, 60),  # the step in which they come
        st.sampled_from("aaaabc"),
        st.integers(1, 12),  # requests
        st.integers(2, 40),  # tokens of a prompt
        st.integers(1, 30),  # tokens of an answer
    ),
    min_size=1,
    max_size=25,
)


def play(server: Server, arrivals: list[tuple[int, str, int, int, int]]) -> Server:
    coming = sorted(arrivals)
    while coming or server.scheduler.has_unfinished_requests():
        while coming and coming[0][0] <= server.now:
            server.add(*coming.pop(0)[1:])
        server.step()
    return server


@settings(max_examples=40, deadline=None)
@given(
    arrivals=KEYS,
    num_places=st.integers(1, 40),
    num_ahead=st.integers(0, 1),
    num_blocks=st.sampled_from([18, 60, 5000]),
    policy=st.sampled_from(["fair", "deadline"]),
)
def test_whatever_comes_the_rules_of_places_hold_and_the_decisions_are_repeatable(
    arrivals, num_places, num_ahead, num_blocks, policy
):
    """`step` checks the rules, and `land` the answers."""
    servers = [Server(num_places, policy, num_ahead=num_ahead, num_blocks=num_blocks) for _ in range(2)]
    for server in servers:
        play(server, arrivals)
        assert server.ended.keys() == server.prompts.keys()
    assert servers[0].decisions.hexdigest() == servers[1].decisions.hexdigest()


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    num_places=st.integers(1, 12),
    num_others=st.integers(1, 6),
    num_requests=st.integers(1, 4),
)
def test_no_request_starves_however_many_short_ones_others_send(lengths, num_places, num_others, num_requests):
    """A key needs a step for each of its tokens, in one place, and with more keys than places they take turns."""
    server = Server(num_places)
    names = [server.add("z", max_tokens=length)[0] for length in lengths]
    num_turns = -(-(num_others + 1) // num_places)
    limit = 50 + 2 * (sum(lengths) + 4 * len(lengths)) * num_turns
    while not all(name in server.ended for name in names):
        for tenant in "bcdefg"[:num_others]:
            num_waiting = sum(request.arrival.tenant == tenant for request in server.scheduler.waiting)
            server.add(tenant, max(num_requests - num_waiting, 0), max_tokens=3)
        server.step()
        assert server.now <= limit


@settings(max_examples=30, deadline=None)
@given(arrivals=KEYS, num_places=st.integers(2, 20), num_steps=st.integers(1, 60))
def test_a_snapshot_knows_who_runs_and_who_yielded(arrivals, num_places, num_steps):
    original, restored = Server(num_places), Server(num_places)
    for arrival in arrivals:
        original.add(*arrival[1:])
    original.steps(num_steps)
    state, requests = take_snapshot(original.scheduler)
    restore_snapshot(restored.scheduler, state, requests)
    assert take_snapshot(restored.scheduler)[0] == state
    assert not wrong_counts(restored.scheduler)
