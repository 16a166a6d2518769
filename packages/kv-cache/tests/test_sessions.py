"""Eviction by sessions: found by their tokens, kept by what their pauses were like so far."""

import random

import pytest

from llmstack_kv_cache import KVCacheGroup, KVCacheManager
from llmstack_kv_cache.pauses import MAX_CLASSES
from llmstack_kv_cache.session_ledger import MAX_CONTINUED_TURNS, MAX_PAUSED_TURNS, MAX_TENANTS
from llmstack_kv_cache.session_order import HEAD, SessionOrder
from llmstack_kv_cache.session_turns import Segment
from llmstack_kv_cache.snapshot import num_snapshot_items, restore_snapshot, take_snapshot

SIZE = 4
CALL, ANSWER = (1,), (0,)


class Engine:
    """Sends turns of sessions to a cache, one after the other."""

    def __init__(self, num_blocks):
        self.cache = KVCacheManager(num_blocks, SIZE, knows_sessions=True)
        self.contexts = {}
        self.num_requests = 0

    def turn(self, name, new_tokens, ending, now_s, salt="", begins_with=()):
        """The tokens of the prompt, and those that were found."""
        context = self.contexts.get(name, list(begins_with)) + new_tokens
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        sessions = self.cache.sessions
        sessions.now_s = now_s
        block_ids, num_found = self.cache.get_computed_blocks(request_id, context, salt)
        assert self.cache.allocate_slots(request_id, len(context), block_ids, salt) is not None
        sessions.begin(request_id, context, salt, num_found)
        self.cache.cache_blocks(request_id, context, len(context))
        sessions.end(request_id, len(context), ending)
        self.cache.free(request_id)
        self.cache.check_integrity()
        assert self.cache._order.pauses.keys() == self.cache._order.segments.keys()
        self.contexts[name] = context
        return len(context), num_found

    def teach(self):
        """Sessions whose tools return within seconds, and whose users never do."""
        now_s = 0.0
        for number in range(12):
            for _ in range(4):
                self.turn(f"taught {number}", own(100 + number, 16), CALL, now_s)
                now_s += 2.0
            self.turn(f"taught {number}", own(100 + number, 16), ANSWER, now_s)
            now_s += 400.0
        return now_s


def own(number, count):
    """Tokens of one session alone."""
    return [1000 + number] * count


def test_a_session_is_found_by_its_tokens_and_what_it_computes_again_is_counted():
    engine = Engine(64)
    engine.turn("a", own(1, 40), CALL, 0.0)
    engine.turn("a", own(2, 8), CALL, 1.0)
    engine.turn("b", own(3, 40), CALL, 2.0)
    sessions = engine.cache.sessions
    assert (sessions.num_turns, sessions.num_continued, sessions.computed.num_again) == (3, 1, 0)
    engine.cache.reset_prefix_cache()
    assert engine.turn("a", own(4, 8), CALL, 3.0) == (56, 0)
    assert (sessions.num_continued, sessions.computed.num_again) == (2, 48)


def test_without_experience_the_longest_pause_is_evicted_first():
    engine = Engine(40)
    engine.turn("old", own(1, 64), CALL, 0.0)
    engine.turn("new", own(2, 64), CALL, 30.0)
    engine.turn("other", own(3, 64), CALL, 60.0)
    assert engine.turn("new", own(2, 4), CALL, 61.0)[1] == 64
    assert engine.turn("old", own(1, 4), CALL, 62.0)[1] < 64


@pytest.mark.parametrize("is_taught", [False, True])
def test_a_session_whose_tool_will_return_is_kept_before_one_that_has_answered_later(is_taught):
    engine = Engine(40)
    now_s = engine.teach() if is_taught else 0.0
    engine.turn("tool", own(1, 64), CALL, now_s)
    engine.turn("answered", own(2, 64), ANSWER, now_s + 4)
    engine.turn("other", own(3, 64), CALL, now_s + 5)
    num_found = engine.turn("tool", own(1, 4), CALL, now_s + 6)[1]
    assert (num_found == 64) is is_taught


def test_what_sessions_begin_with_outlives_the_sessions():
    engine = Engine(60)
    shared = list(range(5000, 5048))
    engine.turn("a", own(1, 48), ANSWER, 0.0, begins_with=shared)
    engine.turn("b", own(2, 48), ANSWER, 1.0, begins_with=shared)
    for number in range(6):
        engine.turn(f"other {number}", own(10 + number, 64), ANSWER, 2.0 + number)
    assert engine.turn("c", own(3, 48), ANSWER, 20.0, begins_with=shared)[1] == 48


def test_tenants_share_nothing_and_learn_nothing_of_each_other():
    engine = Engine(40)
    now_s = engine.teach()
    engine.turn("tool", own(1, 64), CALL, now_s, salt="k")
    engine.turn("answered", own(2, 64), ANSWER, now_s + 4, salt="k")
    engine.turn("other", own(3, 64), CALL, now_s + 5, salt="k")
    assert engine.turn("tool", own(1, 4), CALL, now_s + 6, salt="k")[1] < 64


def test_what_is_known_is_bounded():
    engine = Engine(40)
    for number in range(MAX_TENANTS + 5):
        engine.turn(f"t{number}", own(number, 16), ANSWER, number, salt=f"{number}")
    order = engine.cache._order
    assert list(order.tenants) == [f"{number}" for number in range(5, MAX_TENANTS + 5)]
    for number in range(MAX_PAUSED_TURNS + 9):
        engine.cache.sessions.now_s += 1
        request_id = f"x{number}"
        order.begin(request_id, own(number, 16), "", 0)
        order.end(request_id, 16, ANSWER)
        order.take_ended(Segment([]))
    assert order.tenants[""].num_turns <= MAX_PAUSED_TURNS + MAX_CONTINUED_TURNS
    assert not order.running


def test_a_tenant_with_many_salts_makes_no_other_one_forgotten():
    order = SessionOrder(SIZE)
    for number in range(3):
        order.begin(f"b{number}", own(number, 16), f"b{number}", 0, "b")
    for number in range(MAX_TENANTS + 5):
        order.begin(f"a{number}", own(number, 16), f"a{number}", 0, "a")
    assert len(order.tenants) == MAX_TENANTS
    assert [salt for salt in order.tenants if salt.startswith("b")] == ["b0", "b1", "b2"]
    assert "a0" not in order.tenants
    assert f"a{MAX_TENANTS + 4}" in order.tenants


def begin_with(engine, number):
    """Two sessions with a beginning that no others have."""
    shared = list(range(100 * number, 100 * number + 48))
    for half in range(2):
        engine.turn(f"{number} {half}", own(2 * number + half, 48), ANSWER, 0.0, begins_with=shared)


def test_beginnings_that_were_evicted_are_not_waited_for():
    engine = Engine(60)
    for number in range(100):
        begin_with(engine, number)
    order = engine.cache._order
    heads = [pause for _, _, pause in order.due if pause.pause_class == HEAD]
    assert len(heads) > 90
    assert [pause for pause in heads if pause.is_open and pause.segment is None] == []
    other = Engine(60)
    other.num_requests = engine.num_requests
    restore_snapshot(other.cache, take_snapshot(engine.cache))
    for one in (engine, other):
        one.turn("later", own(1, 64), ANSWER, 50.0)
    assert take_snapshot(other.cache) == take_snapshot(engine.cache)


def test_classes_of_pauses_are_bounded_and_a_large_prompt_ranks_few(monkeypatch):
    engine = Engine(12_000)
    for number in range(400):  # each answer ends with other tokens
        engine.turn(f"{number}", own(number, 100), (number, -number), 0.01 * number)
    order = engine.cache._order
    assert len(order.segments) > 390
    assert len({pause_class for _, pause_class, _ in order._groups._groups}) <= MAX_CLASSES
    num_ranked = 0
    worth = order._worth

    def counted(*values):
        nonlocal num_ranked
        num_ranked += 1
        return worth(*values)

    monkeypatch.setattr(order._groups, "_worth", counted)
    assert engine.cache.allocate_slots("large", 11_000 * SIZE) is not None
    assert len(order.segments) < 50
    assert num_ranked < 1000  # and not as many as segments times groups


@pytest.mark.parametrize("seed", range(4))
def test_what_is_next_is_the_least_of_all_groups(seed, monkeypatch):
    found = SessionOrder.next
    num_checked = 0

    def checked(order):
        nonlocal num_checked
        num_checked += 1
        segment = found(order)
        groups = order._groups
        ranks = [groups._rank(key, next(iter(group))) for key, group in groups._groups.items()]
        assert order.pauses[segment] is min(ranks, key=lambda rank: rank[:3])[4]
        return segment

    monkeypatch.setattr(SessionOrder, "next", checked)
    _drawn_turns(Engine(120), random.Random(seed), 300, 0.0)
    assert num_checked > 100


def test_a_request_without_blocks_that_ends_leaves_nothing():
    cache = KVCacheManager(20, SIZE, knows_sessions=True)
    cache.sessions.begin("a", own(1, 20), "", 0)
    cache.sessions.end("a", 0, ())
    cache.sessions.end("unknown", 5, ())
    assert take_snapshot(cache)["sessions"]["running"] == []
    assert take_snapshot(cache)["sessions"]["turns"] == []


def _drawn_turns(engine, rng, num_turns, now_s):
    answers = []
    shared = list(range(5000, 5024))
    for _ in range(num_turns):
        now_s += rng.choice([0.1, 1.0, 9.0, 70.0])
        number, salt = rng.randrange(8), rng.choice(["", "k"])
        name = f"{number}{salt}"
        if rng.random() < 0.1:
            engine.contexts.pop(name, None)
        if rng.random() < 0.1 and engine.contexts:
            engine.contexts[name] = list(engine.contexts[rng.choice(sorted(engine.contexts))])
        if len(engine.contexts.get(name, ())) > 200:
            engine.contexts.pop(name)
        answers.append(
            engine.turn(name, own(rng.randrange(50), rng.randrange(1, 30)), rng.choice([CALL, ANSWER, (-1,)]), now_s,
                        salt, begins_with=shared)
        )  # fmt: skip
    return answers, now_s


@pytest.mark.parametrize("seed", range(4))
def test_a_restored_cache_answers_the_same(seed):
    rng, engine = random.Random(seed), Engine(120)
    _, now_s = _drawn_turns(engine, rng, 150, 0.0)
    assert engine.cache.stats().num_evictions > 100
    state = take_snapshot(engine.cache)
    assert num_snapshot_items(engine.cache) > len(state["sessions"]["turns"]) * 2 * SIZE
    other = Engine(120)
    restore_snapshot(other.cache, state)
    other.contexts = {name: list(context) for name, context in engine.contexts.items()}
    other.num_requests = engine.num_requests
    assert take_snapshot(other.cache) == state
    further = rng.getstate()
    expected = _drawn_turns(engine, rng, 150, now_s)
    rng.setstate(further)
    assert _drawn_turns(other, rng, 150, now_s) == expected
    assert take_snapshot(other.cache) == take_snapshot(engine.cache)


def test_caches_with_windows_are_refused():
    groups = [KVCacheGroup("full"), KVCacheGroup("window", 8)]
    with pytest.raises(ValueError, match="knows_sessions needs one group"):
        KVCacheManager(20, SIZE, groups=groups, knows_sessions=True)
