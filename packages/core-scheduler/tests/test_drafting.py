"""Draft tokens: guessed, given slots, verified by the runner, and taken back where they were wrong."""

import pytest

from llmstack_core_scheduler import Scheduler, SchedulerConfig, SpeculativeConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager, FakeModelRunner, next_token
from llmstack_types import EngineCoreRequest, FinishReason, ModelRunnerOutput, SamplingParams, TokenLogprobs


class Guesses:
    """A source of drafts that always has the same ones."""

    def __init__(self, *token_ids):
        self.token_ids = list(token_ids)
        self.forgotten, self.learned = [], []

    def propose(self, request_id, token_ids, max_num_tokens, owner):
        return self.token_ids

    def learn(self, owner, token_ids):
        self.learned.append((owner, token_ids))

    def forget(self, request_id):
        self.forgotten.append(request_id)


class Knows:
    """A source of drafts that is always right."""

    def propose(self, request_id, token_ids, max_num_tokens, owner):
        text = list(token_ids)
        for _ in range(max_num_tokens):
            text.append(next_token(text))
        return text[len(token_ids) :]

    def learn(self, owner, token_ids):
        pass

    def forget(self, request_id):
        pass


def make_scheduler(source, num_blocks=20, block_size=4, **config):
    defaults = {"max_num_batched_tokens": 16, "max_model_len": 64, "num_lookahead_slots": 3}
    manager = FakeKVCacheManager(num_blocks, block_size)
    return Scheduler(SchedulerConfig(**(defaults | config)), manager, draft_source=source)


def request_of(request_id, length, max_tokens, **kwargs):
    return EngineCoreRequest(request_id, list(range(length)), SamplingParams(max_tokens=max_tokens, **kwargs), (50,))


def update(scheduler, scheduled, *sampled):
    output = ModelRunnerOutput([row.request_id for row in scheduled.scheduled_requests], list(sampled))
    return scheduler.update_from_output(scheduled, output, 0.0).outputs


def test_drafts_are_part_of_the_row_and_of_the_budget():
    scheduler = make_scheduler(Guesses(5, 6, 7, 8))
    scheduler.add_request(request_of("a", 6, 20))
    scheduled = scheduler.schedule(0.0)
    (row,) = scheduled.scheduled_requests
    assert list(row.draft_token_ids) == [5, 6, 7]
    assert (row.num_scheduled_tokens, len(row.new_block_ids)) == (9, 3)
    assert scheduled.total_num_scheduled_tokens == 9


@pytest.mark.parametrize(("sampled", "start"), [([9], 6), ([5, 9], 7), ([5, 6, 9], 8), ([5, 6, 7, 9], 9)])
def test_the_slots_of_rejected_drafts_are_computed_again(sampled, start):
    scheduler = make_scheduler(Guesses(5, 6, 7))
    scheduler.add_request(request_of("a", 6, 20))
    (message,) = update(scheduler, scheduler.schedule(0.0), sampled)
    assert message.new_token_ids == sampled
    (row,) = scheduler.schedule(0.0).scheduled_requests
    assert row.num_computed_tokens == start
    stats = scheduler.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (6, len(sampled) - 1)
    # Blocks that it has room in already are not asked for again.
    assert stats.num_blocks - stats.num_free_blocks == -(-(start + 4) // 4)


def test_of_several_tokens_those_after_the_end_are_dropped():
    scheduler = make_scheduler(Guesses(7, 50))
    scheduler.add_request(request_of("a", 4, 5, logprobs=0))
    scheduled = scheduler.schedule(0.0)
    entries = [TokenLogprobs((token_id,), (-1.0,), 1) for token_id in (7, 50, 8)]
    output = ModelRunnerOutput(["a"], [[7, 50, 8]], logprobs={"a": entries})
    (message,) = scheduler.update_from_output(scheduled, output, 0.0).outputs
    assert message.new_token_ids == [7, 50]
    assert message.logprobs == entries[:2]
    assert message.finish_reason is FinishReason.STOP
    stats = scheduler.stats()
    assert stats.num_free_blocks == 20
    assert stats.num_accepted_draft_tokens_per_place == (1, 1, 0)


def test_more_tokens_than_the_row_can_have_sampled_fail_it():
    scheduler = make_scheduler(None)
    scheduler.add_request(request_of("a", 4, 9))
    (message,) = update(scheduler, scheduler.schedule(0.0), [7, 8])
    assert message.finish_reason is FinishReason.ERROR
    assert "2 tokens" in message.error


def test_no_draft_goes_beyond_the_end_of_a_request():
    scheduler = make_scheduler(Guesses(5, 6, 7))
    scheduler.add_request(request_of("a", 6, 2))
    scheduler.add_request(request_of("b", 6, 1))
    rows = scheduler.schedule(0.0).scheduled_requests
    assert [list(row.draft_token_ids) for row in rows] == [[5], []]


def test_drafts_take_no_block_from_other_requests_and_no_token_from_waiting_ones():
    scheduler = make_scheduler(Guesses(5, 6, 7), num_blocks=4, max_num_batched_tokens=10)
    scheduler.add_request(request_of("a", 4, 9))
    scheduler.add_request(request_of("b", 4, 9))
    rows = scheduler.schedule(0.0).scheduled_requests
    assert [list(row.draft_token_ids) for row in rows] == [[5, 6], []]
    scheduler = make_scheduler(Guesses(5, 6, 7), num_blocks=2)
    scheduler.add_request(request_of("a", 8, 1))
    scheduler.add_request(request_of("b", 3, 6))
    assert len(scheduler.schedule(0.0).scheduled_requests) == 1


def test_the_first_rows_take_the_budget_for_drafts():
    scheduler = make_scheduler(Guesses(5, 6, 7), max_num_batched_tokens=8)
    scheduler.add_request(request_of("a", 3, 20))
    scheduler.add_request(request_of("b", 3, 20))
    rows = scheduler.schedule(0.0).scheduled_requests
    assert [list(row.draft_token_ids) for row in rows] == [[5, 6], []]


def test_a_row_of_a_beam_search_gets_no_drafts():
    scheduler = make_scheduler(Guesses(5, 6, 7))
    scheduler.add_request(request_of("a", 6, 9, use_beam_search=True))
    (row,) = scheduler.schedule(0.0).scheduled_requests
    assert list(row.draft_token_ids) == []


def test_the_source_forgets_a_request_when_it_ends_is_aborted_or_loses_its_row():
    source = Guesses()
    scheduler = make_scheduler(source, num_blocks=2)
    scheduler.add_request(request_of("a", 4, 4))
    scheduler.add_request(request_of("b", 4, 4))
    update(scheduler, scheduler.schedule(0.0), [1], [2])
    scheduled = scheduler.schedule(0.0)
    assert source.forgotten == ["b"]
    assert [row.request_id for row in scheduled.scheduled_requests] == ["a"]
    update(scheduler, scheduled, [50])
    assert source.forgotten == ["b", "a"]
    scheduler.schedule(0.0)
    scheduler.abort_requests(["b"])
    assert source.forgotten == ["b", "a", "b"]


def test_a_configured_method_needs_no_source():
    speculative = SpeculativeConfig("ngram", 3)
    scheduler = make_scheduler(None, num_lookahead_slots=0, speculative=speculative)
    scheduler.add_request(EngineCoreRequest("a", [1, 2, 3, 4, 9, 1, 2], SamplingParams(max_tokens=9)))
    (row,) = scheduler.schedule(0.0).scheduled_requests
    assert list(row.draft_token_ids) == [3, 4, 9]


def test_a_row_with_drafts_is_not_scheduled_ahead():
    scheduler = make_scheduler(Guesses(5))
    scheduler.add_request(request_of("a", 6, 20))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert second.scheduled_requests == []
    update(scheduler, first, [5, 9])
    update(scheduler, second)
    assert scheduler.schedule(0.0).scheduled_requests[0].num_computed_tokens == 7


@pytest.mark.parametrize("source", [None, Knows(), Guesses(1, 2, 3)])
def test_an_answer_does_not_depend_on_who_guesses(source):
    scheduler, runner = make_scheduler(source), FakeModelRunner(20, 4)
    for request_id in "ab":
        scheduler.add_request(request_of(request_id, 5, 17))
    answers, num_steps = {"a": [], "b": []}, 0
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(0.0)
        num_steps += 1
        for message in scheduler.update_from_output(scheduled, runner.execute_model(scheduled), 0.0).outputs:
            answers[message.request_id] += message.new_token_ids
    text = list(range(5))
    for _ in range(17):
        text.append(next_token(text))
    assert answers == {"a": text[5:], "b": text[5:]}
    if isinstance(source, Knows):
        assert num_steps < 12
