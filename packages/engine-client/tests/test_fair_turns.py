"""Turns at work outside of the scheduler."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_client.fair_turns import FairTurns

QUANTUM = 100


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 300)), min_size=1, max_size=60))
def test_tenants_that_wait_have_cost_the_same_but_for_a_quantum_and_one_piece(work: list[tuple[str, int]]) -> None:
    turns, left, spent = FairTurns(QUANTUM), Counter(tenant for tenant, _ in work), dict.fromkeys("abc", 0)
    for number, (tenant, _) in enumerate(work):
        turns.add(number, tenant)
    bound = QUANTUM + max(num_tokens for _, num_tokens in work)
    while (number := turns.begin_next()) is not None:
        tenant, num_tokens = work[number]
        turns.end(number, num_tokens)
        spent[tenant] += num_tokens
        left[tenant] -= 1
        waiting = [spent[one] for one in left if left[one]]
        assert not waiting or max(waiting) - min(waiting) <= 2 * bound
    assert not any(left.values())


def test_work_that_was_taken_out_has_no_turn() -> None:
    turns = FairTurns(QUANTUM)
    turns.add(1, "a")
    turns.add(2, "b")
    turns.remove(1)
    assert [turns.begin_next(), turns.begin_next()] == [2, None]
