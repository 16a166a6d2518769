"""The choice of a replica: what is known of caches, what is expected there, and load."""

from __future__ import annotations

import random

import pytest

from llmstack_engine_client.routing import ReplicaLoad, Router, RoutingIndex, RoutingPolicy, choose_replica
from llmstack_engine_core.messages.protocol import CacheUpdate
from llmstack_kv_cache import segment_keys
from llmstack_kv_cache.segments import pack_keys

EXACT, LOAD, ROUND_ROBIN = RoutingPolicy
PROMPT = list(range(1024))
KEYS = segment_keys(PROMPT, 16)


def whole(*keys: int) -> CacheUpdate:
    return CacheUpdate(0, True, pack_keys(keys))


def make_router(num_replicas: int = 3, policy: RoutingPolicy = EXACT) -> Router:
    router = Router(num_replicas, policy)
    router.set_block_size(16)
    for replica in range(num_replicas):
        assert router.apply(replica, whole())
    return router


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    idle = [ReplicaLoad()] * 3
    assert choose_replica(EXACT, 1024, [0, 512, 256], idle, 0) == 1
    assert choose_replica(EXACT, 1024, [0, 0, 0], idle, 0) == 0


def test_a_queue_outweighs_a_hit_that_is_shorter_than_an_eighth_of_it() -> None:
    for num_queued, expected in ((4000, 1), (4200, 0)):
        loads = [ReplicaLoad(), ReplicaLoad(num_queued_tokens=num_queued)]
        assert choose_replica(EXACT, 1024, [0, 512], loads, 0) == expected


def test_requests_in_flight_outweigh_a_hit_of_64_tokens_each() -> None:
    for num_requests, expected in ((7, 1), (9, 0)):
        loads = [ReplicaLoad(), ReplicaLoad(num_requests=num_requests)]
        assert choose_replica(EXACT, 1024, [0, 512], loads, 0) == expected


def test_idle_replicas_share_what_no_replica_has_cached() -> None:
    router = make_router()
    for number in range(60):
        router.route(str(number), [number] * 500, "", [0, 0, 0])
        router.end(str(number))
    assert len(set(router._num_computed_tokens)) == 1


def test_policies_without_caches_count_requests_or_take_turns() -> None:
    loads = [ReplicaLoad(2), ReplicaLoad(1), ReplicaLoad(1)]
    assert choose_replica(LOAD, 100, [100, 0, 0], loads, 0) == 1
    assert [choose_replica(ROUND_ROBIN, 100, [0, 0, 0], loads, turn) for turn in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize("policy", RoutingPolicy)
def test_a_replica_that_computes_nothing_gets_nothing_while_another_does(policy: RoutingPolicy) -> None:
    loads = [ReplicaLoad(is_available=False), ReplicaLoad(num_requests=90), ReplicaLoad(is_available=False)]
    assert {choose_replica(policy, 100, [100, 0, 100], loads, turn) for turn in range(3)} == {1}
    none = [ReplicaLoad(is_available=False)] * 2
    assert choose_replica(policy, 100, [0, 50], none, 0) in (0, 1)


def test_the_index_finds_leading_segments_of_each_replica_and_no_gaps() -> None:
    index = RoutingIndex(3)
    assert index.apply(0, whole(*KEYS[:5]))
    assert index.apply(1, whole(*KEYS[:2], *KEYS[3:]))
    assert index.find(KEYS) == [5, 2, 0]
    assert index.apply(0, CacheUpdate(1, False, removed=pack_keys(KEYS[1:2])))
    assert index.apply(2, whole(*KEYS))
    assert index.find(KEYS) == [1, 2, 8]
    assert index.find([]) == [0, 0, 0]


def test_a_gap_in_the_numbers_clears_the_part_of_that_replica_alone() -> None:
    index = RoutingIndex(2)
    index.apply(0, whole(*KEYS))
    index.apply(1, whole(*KEYS))
    assert not index.apply(0, CacheUpdate(2, False, pack_keys([7])))
    assert (index.find(KEYS), index.num_gaps) == ([0, 8], 1)
    assert not index.apply(0, CacheUpdate(3, False, pack_keys([7])))
    assert index.apply(0, whole(*KEYS[:1]))
    assert index.find(KEYS) == [1, 8]


def test_a_replica_has_no_more_than_its_share_of_the_index() -> None:
    index = RoutingIndex(2, max_segments=8)
    index.apply(0, whole(*KEYS))
    index.apply(1, whole(*KEYS[:1]))
    assert (index.find(KEYS), index.num_left_out, len(index)) == ([4, 1], 4, 4)


def test_what_is_under_way_counts_as_cached_until_two_reports_after_its_end() -> None:
    router = make_router(2)
    assert router.route("a", PROMPT, "", [0, 0]) == 0
    assert router.route("b", PROMPT, "", [1, 0]) == 0
    router.end("b")
    router.end("a")
    for number, found in ((1, 8), (2, 8), (3, 0)):
        assert router.index.find(KEYS)[0] == found
        router.apply(0, CacheUpdate(number, False, pack_keys([number])))
    assert router.index.find(KEYS)[0] == 0


def test_of_what_is_expected_above_the_limit_the_oldest_is_forgotten() -> None:
    index = RoutingIndex(1, max_segments=4)
    index.apply(0, whole())
    index.expect(0, KEYS[:3])
    index.expect(0, [7])
    index._max_expected = 2
    index.expect(0, KEYS[:1])
    assert (index.find(KEYS), index.find([7]), len(index._key_to_expecting)) == ([1], [1], 2)


def test_what_is_evicted_while_a_prompt_with_it_waits_still_counts_there() -> None:
    router = make_router(2)
    router.apply(1, whole(*KEYS))
    assert router.route("waits", PROMPT, "", [0, 0]) == 1
    router.apply(1, CacheUpdate(1, False, removed=pack_keys(KEYS)))
    assert router.route("next", PROMPT, "", [0, 1]) == 1
    for name in ("waits", "next"):
        router.end(name)
    for number in (2, 3):
        router.apply(1, CacheUpdate(number, False))
    assert router.index.find(KEYS) == [0, 0]


def test_prompts_that_ended_are_not_kept_for_ever_where_a_replica_has_nothing_to_report() -> None:
    router = make_router(1)
    for number in range(2000):
        router.route(str(number), PROMPT, "", [0])
        router.end(str(number))
    before, since = router.index._settling[0]
    assert len(before) + len(since) < 2 * 256 + 1


def test_what_has_been_reported_stays_when_its_prompt_has_ended() -> None:
    router = make_router(2)
    router.route("a", PROMPT, "", [0, 0])
    router.apply(0, CacheUpdate(1, False, pack_keys(KEYS)))
    router.end("a")
    for number in (2, 3, 4):
        router.apply(0, CacheUpdate(number, False, pack_keys([number])))
    assert router.index.find(KEYS) == [8, 0]


def test_tenants_share_nothing() -> None:
    router = make_router(2)
    router.apply(1, whole(*segment_keys(PROMPT, 16, "tenant")))
    assert router.route("own", PROMPT, "tenant", [0, 0]) == 1
    assert router.route("another's", PROMPT, "other", [0, 0]) == 0


def test_a_replica_that_starts_again_has_nothing_cached_and_is_not_flooded() -> None:
    router = make_router(2)
    router.apply(1, whole(*KEYS))
    for number in range(20):
        router.route(f"old{number}", [number] * 640, "", [0, 9])
        router.end(f"old{number}")
    router.restart(1)
    assert router.index.find(KEYS) == [router.index.find(KEYS)[0], 0]
    others = [router.route(f"new{number}", [100 + number] * 640, "", [0, 0]) for number in range(10)]
    assert 3 <= sum(others) <= 7


@pytest.mark.parametrize("seed", range(5))
def test_random_updates_lead_to_what_the_replicas_have(seed: int) -> None:
    rng, index = random.Random(seed), RoutingIndex(4)
    contents: list[set[int]] = [set() for _ in range(4)]
    numbers = [0] * 4
    for replica in range(4):
        index.apply(replica, whole())
    for _ in range(300):
        replica = rng.randrange(4)
        numbers[replica] += 1
        if rng.random() < 0.03:
            contents[replica] = set(rng.sample(KEYS, 3))
            index.apply(replica, CacheUpdate(numbers[replica], True, pack_keys(sorted(contents[replica]))))
        else:
            added = {key for key in KEYS if rng.random() < 0.3} - contents[replica]
            removed = {key for key in contents[replica] if rng.random() < 0.3}
            contents[replica] = contents[replica] - removed | added
            packed = pack_keys(sorted(added)), pack_keys(sorted(removed))
            assert index.apply(replica, CacheUpdate(numbers[replica], False, *packed))
        expected = [next((i for i, key in enumerate(KEYS) if key not in content), 8) for content in contents]
        assert index.find(KEYS) == expected
    assert len(index) == len(set().union(*contents))
