"""The queue is always sorted by rank."""

from hypothesis import given
from hypothesis import strategies as st

from llmstack_core_scheduler import PriorityPolicy, Request, RequestQueue
from llmstack_core_scheduler.request_queue import POLICIES
from llmstack_types import EngineCoreRequest, SamplingParams
from llmstack_types.vocabulary import SchedulingPolicyName, words_of


def test_every_policy_that_an_option_may_name_is_there():
    assert tuple(POLICIES) == words_of(SchedulingPolicyName)


@given(st.lists(st.tuples(st.integers(-2, 2), st.floats(0, 3), st.booleans()), max_size=30))
def test_adding_and_removing_keep_the_order(arrivals):
    queue, expected, policy = RequestQueue(), [], PriorityPolicy()
    for number, (priority, arrival_time_s, removes) in enumerate(arrivals):
        arrival = EngineCoreRequest(
            str(number), [1], SamplingParams(), arrival_time_s=arrival_time_s, priority=priority
        )
        request = Request(arrival, policy.rank(arrival, number), 2)
        queue.add(request)
        expected = sorted([*expected, request], key=lambda other: other.rank)
        if removes:
            queue.remove(expected.pop(len(expected) // 2))
        assert list(queue) == expected
        assert len(queue) == len(expected)
    if expected:
        assert (queue.first(), queue.last()) == (expected[0], expected[-1])
