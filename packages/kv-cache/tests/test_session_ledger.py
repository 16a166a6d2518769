"""Sessions whatever is evicted first: why tokens are computed, what became of pauses, and releases."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_kv_cache import KVCacheManager, session_ledger
from llmstack_kv_cache.computed_tokens import CAUSES
from llmstack_kv_cache.session_ledger import SessionLedger
from llmstack_kv_cache.session_order import SessionOrder
from llmstack_kv_cache.session_snapshot import ledger_state, restore_ledger
from llmstack_kv_cache.session_turns import Tenant
from llmstack_kv_cache.snapshot import restore_snapshot, take_snapshot

SIZE = 4
ANSWER = (0,)


def own(number, count):
    """Tokens of one session alone."""
    return [1000 + number] * count


def chat(cache, request_id, token_ids, now_s=0.0, salt="", owner="", **facts):
    """Runs a request to its end; how many of its tokens were found."""
    cache.sessions.now_s = now_s
    block_ids, num_found = cache.get_computed_blocks(request_id, token_ids, salt)
    assert cache.allocate_slots(request_id, len(token_ids), block_ids, salt) is not None
    cache.sessions.begin(request_id, token_ids, salt, num_found, owner, **facts)
    cache.cache_blocks(request_id, token_ids, len(token_ids))
    cache.sessions.end(request_id, len(token_ids), ANSWER, token_ids)
    cache.free(request_id)
    cache.check_integrity()
    return num_found


def computed(cache):
    """Tokens by cause, without causes of none."""
    return {cause: count for cause, count in zip(CAUSES, cache.sessions.num_computed_tokens, strict=True) if count}


@pytest.fixture(params=[False, True], ids=["oldest first", "by sessions"])
def cache(request, monkeypatch):
    """A cache of 24 blocks, where prompts are short and followed all the same."""
    monkeypatch.setattr(session_ledger, "MIN_NUM_TOKENS", 0)
    return KVCacheManager(24, SIZE, knows_sessions=request.param)


def test_tokens_are_counted_by_why_they_are_computed(cache):
    text = list(range(42))
    chat(cache, "first", text[:30])
    assert computed(cache) == {"new": 30}
    chat(cache, "goes on", text[:38], 1.0)
    assert computed(cache) == {"new": 38, "block_end": 2}
    for number in range(3):
        chat(cache, f"other {number}", own(number, 64), 2.0)
    before = computed(cache)["new"]
    assert chat(cache, "evicted", text, 3.0) == 0
    assert computed(cache) == {"new": before + 4, "block_end": 4, "evicted": 36}
    cache.reset_prefix_cache()
    chat(cache, "reset", [*text, 1], 4.0)
    assert (computed(cache)["reset"], computed(cache)["evicted"]) == (40, 36)
    chat(cache, "elsewhere", [*text, 1], 5.0, salt="an adapter")
    assert computed(cache)["other_adapter"] == 40
    chat(cache, "a stranger", [*text, 1], 6.0, salt="of another key", owner="b")
    assert computed(cache)["other_adapter"] == 40
    cache.sessions.resume(17)
    assert computed(cache)["preempted"] == 17
    assert sum(computed(cache).values()) == 30 + 38 - 28 + 3 * 64 + 42 + 43 + 43 + 43 + 17


@pytest.mark.parametrize("knows_sessions", [False, True])
def test_short_prompts_are_followed_where_something_depends_on_it(knows_sessions):
    cache = KVCacheManager(200, SIZE, knows_sessions=knows_sessions)
    chat(cache, "short", own(1, session_ledger.MIN_NUM_TOKENS - 1))
    assert cache.sessions.num_turns == knows_sessions
    chat(cache, "long", own(2, session_ledger.MIN_NUM_TOKENS))
    chat(cache, "named", own(3, 40), name="mine")
    chat(cache, "last", own(4, 40), is_final=True)
    assert cache.sessions.num_turns == knows_sessions + 3
    assert cache.release_sessions("", "mine") == (1, 40)


def test_what_was_in_the_way_of_the_disk_is_a_cause(cache):
    text = list(range(41))
    chat(cache, "first", text)
    for number in range(2):
        chat(cache, f"other {number}", own(number, 96), 1.0)
    chat(cache, "costly", text, 2.0, disk_miss="costly")
    assert computed(cache)["disk_costly"] == 40
    assert "evicted" not in computed(cache)


def test_beginnings_of_sessions_that_were_evicted_count_as_computed_again(cache):
    head = list(range(20))
    for number in range(2):
        chat(cache, f"s{number}", [*head, *own(number, 21)], number)
    assert "evicted" not in computed(cache)
    chat(cache, "other", own(9, 96), 3.0)
    chat(cache, "s2", [*head, *own(7, 21)], 4.0)
    assert computed(cache)["evicted"] == 20


def test_a_session_that_goes_on_tells_what_became_of_it(cache):
    text = list(range(48))
    chat(cache, "first", text[:40], 10.0)
    chat(cache, "taker", own(1, 76), 15.0)
    num_found = chat(cache, "second", text, 51.0)
    assert 0 < num_found < 40
    assert cache.sessions.take_returns() == [("second", "first", 41.0, 40, num_found, "evicted", 5.0, "taker")]
    assert cache.sessions.take_returns() == []


def test_a_session_is_released_by_its_name_and_its_owner(cache):
    text = list(range(40))
    chat(cache, "r", text, owner="a", name="mine")
    assert cache.release_sessions("b", "mine") == (0, 0)
    assert cache.release_sessions("a", "other") == (0, 0)
    assert cache.release_sessions("a", "mine") == (1, 40)
    assert cache.stats().num_cached_blocks == 0
    cache.check_integrity()
    assert cache.release_sessions("a", "mine") == (1, 0)
    assert chat(cache, "again", [*text, 1], 1.0, owner="a") == 0
    assert computed(cache)["released"] == 40


def test_a_release_looks_at_the_turns_of_its_session_alone(cache, monkeypatch):
    text = list(range(40))
    chat(cache, "r", text, owner="a", name="mine")
    chat(cache, "other", own(1, 40), 1.0, owner="a", name="other")

    def fail(tenant):
        raise AssertionError("the turns of all sessions were looked at")

    monkeypatch.setattr(Tenant, "turns", property(fail))
    assert cache.release_sessions("a", "unknown") == (0, 0)
    assert cache.release_sessions("a", "mine") == (1, 40)


NAMES = ("", "x", "y")
CALLS = st.one_of(
    st.tuples(
        st.just("begin"), st.integers(0, 5), st.integers(0, 2), st.integers(3, 6), st.sampled_from("abcd"),
        st.sampled_from("pq"), st.sampled_from(NAMES),
    ),
    st.tuples(st.just("end"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("release"), st.sampled_from("pq"), st.sampled_from(NAMES[1:])),
    st.tuples(st.just("reset")),
    st.tuples(st.just("snapshot")),
)  # fmt: skip


def walked(ledger):
    """The known sessions that have a name, by their owner and it."""
    known = [turn.running.session for tenant in ledger.tenants.values() for turn in tenant.turns]
    known += [running.session for running in ledger.running.values()]
    named = {}
    for session in known:
        if session.name:
            named.setdefault((session.owner, session.name), set()).add(session)
    return named


def after(ledger, call):
    """The ledger after a call: a new one after a snapshot."""
    what, *facts = call
    if what == "begin":
        number, text, num_blocks, salt, owner, name = facts
        token_ids = [*own(text // 2, 8), *own(text, num_blocks * SIZE - 8)]
        ledger.begin(f"r{number}", token_ids, salt, 0, owner, name=name)
    elif what == "end":
        ledger.end(f"r{facts[0]}", 0 if facts[1] else 40, ANSWER)
    elif what == "release":
        for session in ledger.named(*facts):
            ledger.release(session)
    elif what == "reset":
        ledger.reset()
    else:
        state, ledger = ledger_state(ledger, []), type(ledger)(SIZE)
        restore_ledger(ledger, state, [], {})
        assert ledger_state(ledger, []) == state
    return ledger


@given(st.lists(CALLS, max_size=60), st.sampled_from([SessionLedger, SessionOrder]))
@settings(deadline=None)
def test_the_sessions_by_name_are_those_that_a_walk_over_all_turns_finds(calls, kind):
    ledger = kind(SIZE)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("MIN_NUM_TOKENS", 0), ("MAX_TENANTS", 3), ("MAX_PAUSED_TURNS", 3), ("MAX_CONTINUED_TURNS", 2)
        ):  # fmt: skip
            patch.setattr(session_ledger, name, value)
        for now_s, call in enumerate(calls):
            ledger.now_s = float(now_s)
            before = ledger
            ledger = after(ledger, call)
            named = walked(ledger)
            assert ledger.names._sessions.keys() == named.keys()
            for key, sessions in named.items():
                found = ledger.named(*key)
                assert len(found) == len(sessions)
                assert set(found) == sessions
                if before is not ledger:  # they are released in the same order
                    assert last_requests(found) == last_requests(before.named(*key))


def last_requests(sessions):
    """The last turns of sessions that have one."""
    return [session.last.request_id for session in sessions if session.last is not None]


def test_the_end_of_a_subagent_leaves_what_its_parent_has(cache):
    parent = list(range(32))
    chat(cache, "parent", parent, name="parent")
    chat(cache, "parent goes on", [*parent, *own(1, 8)], 1.0, name="parent")
    chat(cache, "child", [*parent, *own(2, 16)], 2.0, name="child", is_final=True)
    assert cache.stats().num_cached_blocks == 10
    assert chat(cache, "parent again", [*parent, *own(1, 12)], 3.0) == 40
    assert cache.release_sessions("", "child")[1] == 0


def test_the_release_of_a_parent_leaves_what_its_subagent_has(cache):
    parent = list(range(32))
    chat(cache, "parent", parent, name="parent")
    chat(cache, "child", [*parent, *own(2, 16)], 1.0, name="child")
    chat(cache, "parent goes on", [*parent, *own(1, 8)], 2.0, name="parent")
    assert cache.release_sessions("", "parent") == (1, 8)
    assert chat(cache, "child goes on", [*parent, *own(2, 17)], 3.0) == 48


@pytest.mark.parametrize(("is_first", "num_left"), [(False, 44), (True, 24)])
def test_a_release_drops_no_block_that_another_owner_has_found(cache, is_first, num_left):
    head = list(range(32))
    chat(cache, "r", [*head, *own(1, 16)], owner="a" if is_first else "b", name="mine")
    chat(cache, "s", [*head[:24], 7], 1.0, owner="b" if is_first else "a", name="mine")
    chat(cache, "t", [*head, *own(1, 20)], 2.0, owner="a" if is_first else "b", name="mine")
    cache.release_sessions("a", "mine")
    assert cache.get_computed_blocks("x", [*head, *own(1, 16)])[1] == num_left


def test_what_a_request_holds_is_released_when_it_ends(cache):
    text = list(range(41))
    cache.get_computed_blocks("r", text)
    cache.allocate_slots("r", 41)
    cache.sessions.begin("r", text, "", 0, name="mine")
    cache.cache_blocks("r", text, 41)
    assert cache.release_sessions("", "mine") == (1, 0)
    assert cache.stats().num_cached_blocks == 10
    cache.sessions.end("r", 41, ANSWER, text)
    cache.free("r")
    assert cache.stats().num_cached_blocks == 0
    cache.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_releases_at_any_moment_keep_the_books_and_the_snapshots(cache, seed):
    rng = random.Random(seed)
    texts = [[rng.randrange(3) for _ in range(rng.choice((12, 16)))] for _ in range(3)]
    for number in range(60):
        text, owner = rng.choice(texts), rng.choice("ab")
        chat(cache, f"r{number}", text, float(number), owner=owner, name=rng.choice("xyz"), is_final=rng.random() < 0.1)
        if len(text) < 60:
            texts.append([*text, *(rng.randrange(3) for _ in range(rng.randrange(9)))])
        if rng.random() < 0.2:
            cache.release_sessions(rng.choice("ab"), rng.choice("xyz"))
            cache.check_integrity()
        if number % 20 == 19:
            other = KVCacheManager(24, SIZE, knows_sessions=cache._order is not None)
            restore_snapshot(other, take_snapshot(cache))
            assert take_snapshot(other) == take_snapshot(cache)
            for one in (cache, other):
                one.release_sessions("a", "x")
                chat(one, "twice", [*text, 1, 2, 1, 2, 1], 100.0 + number, owner="a")
            assert take_snapshot(other) == take_snapshot(cache)
            assert computed(other) == computed(cache)


def test_a_prompt_of_another_owner_takes_no_session(cache):
    text = list(range(40))
    chat(cache, "first", own(3, 40), owner="c")
    chat(cache, "r", text, 1.0, owner="a", name="mine")
    assert chat(cache, "other", [*text, *own(2, 8)], 2.0, owner="b") == 40
    assert cache.release_sessions("b", "mine") == (0, 0)
    assert cache.release_sessions("a", "mine")[0] == 1
    assert chat(cache, "later", [*text, *own(2, 8), 1], 4.0, owner="a", name="mine") == 48
    cache.release_sessions("a", "mine")
    assert chat(cache, "other again", [*text, *own(2, 8), 2], 5.0, owner="b") == 48
