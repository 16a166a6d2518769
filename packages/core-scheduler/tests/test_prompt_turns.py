"""Shorter prompts go before a long one, which keeps its share of the steps."""

import copy
from itertools import count

import pytest
from core_scheduler_helpers.machine import Machine
from core_scheduler_helpers.steps import make_request, make_scheduler, step
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.prompt_turns import LONG_NUM_STEPS, QUIET_NUM_STEPS
from llmstack_core_scheduler.snapshot import restore_snapshot, take_snapshot
from llmstack_core_scheduler.testing import FakeKVCacheManager

SIZES = {"num_blocks": 2000, "max_model_len": 20_000, "max_num_seqs": 32, "shorter_prompts_first": True}
FIRST_TOKENS = count(step=20_000)
COSTS = {"base_s": 0.01, "prompt_s": 0.005, "decode_s": 0.002, "pair_s": 1.5e-6}
"""Seconds: a token behind 3,333 others takes twice as long as the first one."""


def make(**config):
    return make_scheduler(**(SIZES | config))


def timed(**changes):
    """The same on a clock."""
    return Machine(**(SIZES | COSTS | {"max_num_batched_tokens": 64} | changes))


def serve(num_long_tokens, num_short_tokens=32, rate=1.2, num_short=60, **changes):
    """Serves short prompts that come evenly, and perhaps a long one: seconds to their first tokens, and to the end."""
    machine, firsts, came = timed(**changes), {}, {}
    arrivals = [(number / rate, f"short-{number}", num_short_tokens) for number in range(num_short)]
    arrivals += [(2.5 / rate, "long", num_long_tokens)] if num_long_tokens else []
    arrivals.sort(reverse=True)
    while arrivals or machine.scheduler.has_unfinished_requests():
        if not machine.scheduler.has_unfinished_requests():
            machine.now_s = max(machine.now_s, arrivals[-1][0])
        while arrivals and arrivals[-1][0] <= machine.now_s:
            came_s, name, num_tokens = arrivals.pop()
            add(machine.scheduler, name, num_tokens, max_tokens=2)
            came[name] = came_s
        machine.step()
        for message in machine.messages:
            if message.new_token_ids:
                firsts.setdefault(message.request_id, machine.now_s - came[message.request_id])
    return max(seconds for name, seconds in firsts.items() if name != "long"), machine.now_s


def add(scheduler, name, num_tokens, max_tokens=1, **arrival):
    first = next(FIRST_TOKENS)  # of a prompt that shares nothing with others
    prompt = list(range(first, first + num_tokens))
    scheduler.add_request(make_request(name, num_tokens, max_tokens, prompt=prompt, **arrival))


def share_of_long(scheduler, num_steps, **arrival):
    """The share of a long prompt in the tokens of prompts while others fill each step twice."""
    add(scheduler, "long", 19_000, **arrival)
    num_long = num_tokens = 0
    for number in range(num_steps):
        for part in range(4):
            add(scheduler, f"{number}-{part}", 32)
        rows = step(scheduler)[0]
        num_long += rows.get("long", 0)
        num_tokens += sum(rows.values())
    return num_long / num_tokens


def test_a_long_prompt_has_whole_steps_where_no_other_comes():
    scheduler = make()
    add(scheduler, "long", 640)
    for _ in range(9):
        assert step(scheduler)[0] == {"long": 64}
    add(scheduler, "short", 30)
    assert step(scheduler)[0] == {"long": 64}  # its last tokens
    assert step(scheduler)[0] == {"short": 30}


def test_a_short_prompt_goes_first_and_the_next_one_finds_a_short_step():
    scheduler = make()
    add(scheduler, "long", 10_000)
    assert step(scheduler)[0] == {"long": 64}
    add(scheduler, "short", 40)
    assert step(scheduler)[0] == {"long": 8, "short": 40}
    for _ in range(QUIET_NUM_STEPS - 1):
        assert step(scheduler)[0] == {"long": 30}  # three quarters of what the short one had
    assert step(scheduler)[0] == {"long": 64}


def test_a_prompt_of_few_steps_is_no_long_one():
    scheduler = make()
    add(scheduler, "first", LONG_NUM_STEPS * 64)
    add(scheduler, "short", 40)
    assert step(scheduler)[0] == {"first": 64}
    assert step(scheduler)[0] == {"first": 64}


def test_among_long_prompts_one_with_half_as_much_left_goes_first():
    scheduler = make()
    for name, num_tokens in (("long", 2000), ("alike", 1500), ("shorter", 700)):
        add(scheduler, name, num_tokens)
    assert step(scheduler)[0] == {"long": 8, "shorter": 56}
    names = []
    while scheduler.has_unfinished_requests():
        names += [name for name, message in step(scheduler)[1].items() if message.finish_reason]
    assert names == ["shorter", "long", "alike"]


def test_shorter_prompts_leave_a_long_one_its_share():
    assert share_of_long(make(), 200) == pytest.approx(3 / 12, abs=0.04)


@given(
    data=st.data(), num_long=st.integers(300, 800), policy=st.sampled_from(["fcfs", "fair"]), is_own=st.booleans(),
    pair_s=st.sampled_from([None, 0.0, 1e-6, 1e-3]),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_no_flow_of_shorter_prompts_holds_a_long_one_for_more_than_thrice_its_tokens(
    data, num_long, policy, is_own, pair_s
):
    """Of any key: what is computed of prompts until its first token is at most four times what it has.

    `pair_s`: What attending to a token takes; None for steps whose times are not known.
    """
    machine = timed(pair_s=pair_s or 0.0, policy=policy)
    scheduler = make(policy=policy) if pair_s is None else machine.scheduler
    add(scheduler, "long", num_long, tenant="a")
    num_tokens = number = 0
    sizes = data.draw(st.lists(st.lists(st.integers(1, 64), max_size=6), min_size=1, max_size=12))
    while "long" in {one.request_id for one in [*scheduler.running, *scheduler.waiting.requests]}:
        for size in sizes[number % len(sizes)]:
            number_of_queued = len(scheduler.waiting.requests)
            if number_of_queued < 20:
                add(scheduler, f"{number}-{next(FIRST_TOKENS)}", size, tenant="a" if is_own else f"t{number % 3}")
        number += 1
        rows = step(scheduler)[0] if pair_s is None else machine.step()[0]
        num_tokens += sum(rows.values())
        assert num_tokens <= 4 * num_long + 8 * 64


def test_first_tokens_beside_a_long_prompt_take_at_most_twice_as_long_at_98_percent_of_the_rate():
    """However far the long prompt is: at its end, a token of it takes as long as two at its beginning."""
    alone_s, _ = serve(0)
    _, default_s = serve(4000, shorter_prompts_first=False)
    beside_s, end_s = serve(4000)
    assert beside_s <= 2 * alone_s
    assert end_s <= default_s / 0.98


def test_a_step_of_a_long_prompt_takes_no_longer_where_the_prompt_has_come_further():
    machine, took = timed(), []
    add(machine.scheduler, "long", 12_000)
    for number in range(300):
        if number % 20 == 0:
            add(machine.scheduler, f"short-{number}", 40)
        rows, seconds, _ = machine.step()
        if rows.keys() == {"long"}:
            took.append(seconds)
    at_first, later = max(took[50:100]), max(took[100:])
    assert later <= 1.1 * at_first


def test_of_two_keys_the_one_with_the_long_prompt_has_half():
    scheduler = make(policy="fair")
    assert share_of_long(scheduler, 100, tenant="other") == pytest.approx(1 / 2, abs=0.04)


def test_what_was_saved_lasts_for_some_steps_only():
    scheduler = make()
    add(scheduler, "long", 19_000)
    for _ in range(100):
        step(scheduler)
    longest = waits = 0
    for number in range(100):
        add(scheduler, f"{number}-a", 40)
        add(scheduler, f"{number}-b", 40)
        waits = waits + 1 if step(scheduler)[0]["long"] == 8 else 0
        longest = max(longest, waits)
    assert 4 < longest <= 33


def test_a_long_prompt_takes_blocks_from_those_behind_it():
    scheduler = make(num_blocks=45, max_model_len=700)
    add(scheduler, "long", 690)
    step(scheduler)
    add(scheduler, "short", 300, max_tokens=100)
    num_steps = 0
    while "long" in {request.request_id for request in scheduler.running}:
        step(scheduler)
        num_steps += 1
    assert num_steps < 40
    assert [request.request_id for request in scheduler.waiting] == ["short"]
    while scheduler.has_unfinished_requests():
        step(scheduler)


def test_the_tokens_that_it_begins_with_take_no_room_of_max_prefill_tokens():
    scheduler = make(max_prefill_tokens=40)
    add(scheduler, "long", 10_000)
    step(scheduler)
    add(scheduler, "short", 40)
    assert step(scheduler)[0] == {"long": 8, "short": 40}


def test_running_streams_keep_their_limit():
    scheduler = make(max_itl_steps=3.0)
    add(scheduler, "stream", 4, max_tokens=1000)
    step(scheduler)
    add(scheduler, "long", 10_000)
    alone = step(scheduler)[0]["long"]
    add(scheduler, "short", 6)
    rows = step(scheduler)[0]
    assert 8 < alone < 64
    assert rows == {"stream": 1, "long": 8, "short": 6}


def test_a_restored_scheduler_gives_the_same_turns():
    scheduler = make()
    add(scheduler, "long", 19_000)
    for number in range(60):
        for part in range(number % 4):
            add(scheduler, f"{number}-{part}", 10 + 7 * part)
        step(scheduler)
        restored = make()
        manager = restored.kv_cache_manager
        manager.__dict__.update(copy.deepcopy(scheduler.kv_cache_manager.__dict__))
        restore_snapshot(restored, *take_snapshot(scheduler))
        ahead = copy.deepcopy(scheduler)
        assert [step(restored)[0] for _ in range(6)] == [step(ahead)[0] for _ in range(6)]


def test_a_model_with_states_is_refused():
    manager = FakeKVCacheManager(20, 16)
    manager.has_states = True
    with pytest.raises(ValueError, match="--shorter-prompts-first is for models without states"):
        Scheduler(SchedulerConfig(shorter_prompts_first=True), manager)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"policy": "priority"}, "needs the policy fcfs or fair, got 'priority'"),
        ({"policy": "deadline"}, "needs the policy fcfs or fair, got 'deadline'"),
        ({"pipeline_parallel_size": 2}, "needs one stage"),
        ({"enable_chunked_prefill": False}, "needs enable_chunked_prefill"),
    ],
)
def test_what_excludes_turns_is_refused(changes, text):
    with pytest.raises(ValueError, match=f"shorter_prompts_first {text}"):
        SchedulerConfig(shorter_prompts_first=True, **changes)
