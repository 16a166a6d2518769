"""Requests that begin with another's blocks: several completions of one prompt, and beams."""

import pytest

from llmstack_core_scheduler import RequestStatus, Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager, FakeModelRunner, next_token
from llmstack_types import EngineCoreRequest, InvalidRequestError, SamplingParams

PROMPT = list(range(100, 110))


class WithoutPrefixCache(FakeKVCacheManager):
    def cache_blocks(self, request_id, token_ids, num_computed_tokens):
        pass


class Rig:
    """A scheduler over a runner that knows what is in its blocks."""

    def __init__(self, num_blocks=30, block_size=4, manager=WithoutPrefixCache, **config):
        defaults = {"max_num_batched_tokens": 64, "max_model_len": 64}
        self.manager = manager(num_blocks, block_size)
        self.scheduler = Scheduler(SchedulerConfig(**(defaults | config)), self.manager)
        self.runner = FakeModelRunner(num_blocks, block_size)
        self.answers = {}

    def add(self, request_id, max_tokens=6, **kwargs):
        fields = {"prompt_token_ids": PROMPT, "sampling_params": SamplingParams(max_tokens=max_tokens)} | kwargs
        self.scheduler.add_request(EngineCoreRequest(request_id, **fields))

    def step(self):
        scheduled = self.scheduler.schedule(0.0)
        for message in self.scheduler.update_from_output(scheduled, self.runner.execute_model(scheduled), 0.0).outputs:
            self.answers.setdefault(message.request_id, []).extend(message.new_token_ids)
        return scheduled

    def finish(self):
        while self.scheduler.has_unfinished_requests():
            self.step()
        assert self.manager.num_free_blocks == self.manager.num_blocks


def continuation(token_ids, num_tokens):
    text = list(token_ids)
    for _ in range(num_tokens):
        text.append(next_token(text))
    return text[len(token_ids) :]


def rows_of(scheduled):
    return {row.request_id: (row.num_computed_tokens, row.num_scheduled_tokens) for row in scheduled.scheduled_requests}


# --- several completions of one prompt ----------------------------------------------------------------------------


def test_completions_added_together_share_the_full_blocks_in_the_first_step():
    rig = Rig()
    rig.add("a")
    rig.add("b", fork_of="a")
    scheduled = rig.step()
    assert rows_of(scheduled) == {"a": (0, 10), "b": (8, 2)}
    assert scheduled.block_copies == []
    assert rig.scheduler.stats().num_free_blocks == 26
    assert rig.scheduler.stats().num_forks == 1
    rig.finish()
    assert rig.answers["a"] == rig.answers["b"] == continuation(PROMPT, 6)


def test_a_beam_that_waits_for_its_turn_has_its_copies_before_others_get_the_blocks():
    rig = Rig(num_blocks=10, pipeline_parallel_size=2)
    for request_id in ("x", "y", "parent"):
        rig.add(request_id)
    rig.step()
    text = [*PROMPT, 7]
    assert rig.scheduler.fork_request("parent", EngineCoreRequest("child", text, SamplingParams(max_tokens=3))) == 10
    rig.scheduler.abort_requests(["parent"])
    rig.add("new", prompt_token_ids=[1, 2, 3], max_tokens=1)
    scheduled = rig.step()  # a stage takes two of three requests, and the new one
    assert rows_of(scheduled) == {"x": (10, 1), "y": (10, 1), "new": (0, 3)}
    assert len(scheduled.block_copies) == 1
    rig.scheduler.abort_requests(["x", "y"])
    scheduled = rig.step()
    assert rows_of(scheduled) == {"child": (10, 1)}
    assert scheduled.block_copies == []
    rig.finish()
    assert rig.answers["child"] == continuation(text, 3)


def test_a_completion_copies_no_block_that_its_parent_has_found_in_the_same_step():
    rig = Rig(manager=FakeKVCacheManager)
    output = continuation(PROMPT, 4)
    rig.add("before", output_token_ids=tuple(output))
    rig.add("a", output_token_ids=tuple(output))
    rig.add("b", fork_of="a")
    scheduled = rig.step()
    # The block of positions 8 to 11 is filled by the first row, after all copies.
    assert rows_of(scheduled) == {"before": (0, 14), "a": (12, 2), "b": (8, 2)}
    assert scheduled.block_copies == []
    rig.finish()
    assert rig.answers["a"] == continuation(PROMPT, 6)[4:]
    assert rig.answers["b"] == continuation(PROMPT, 6)


def test_a_completion_that_begins_later_copies_the_block_that_is_begun():
    rig = Rig(max_num_batched_tokens=10)
    rig.add("a")
    rig.add("b", fork_of="a")
    assert rows_of(rig.step()) == {"a": (0, 10)}
    scheduled = rig.step()
    assert rows_of(scheduled) == {"a": (10, 1), "b": (9, 1)}
    assert len(scheduled.block_copies) == 1
    rig.finish()
    assert rig.answers["a"] == rig.answers["b"] == continuation(PROMPT, 6)


def test_a_completion_waits_while_its_prompt_is_computed_and_others_overtake_it():
    rig = Rig(long_prefill_token_threshold=4)
    rig.add("a")
    rig.add("b", fork_of="a")
    rig.add("other", prompt_token_ids=[1, 2])
    assert rows_of(rig.step()) == {"a": (0, 4), "other": (0, 2)}
    assert "b" not in rows_of(rig.step())
    assert rows_of(rig.step())["b"] == (8, 2)
    rig.finish()
    assert rig.answers["b"] == continuation(PROMPT, 6)


def test_a_parent_that_is_gone_makes_a_plain_request_of_its_fork():
    rig = Rig(max_num_seqs=1)
    rig.add("a", max_tokens=1)
    rig.add("b", fork_of="a")
    rig.step()
    assert rows_of(rig.step()) == {"b": (0, 10)}
    rig.add("c", fork_of="nobody")
    rig.finish()
    assert rig.answers["b"] == rig.answers["c"] == continuation(PROMPT, 6)


def test_a_fork_for_prompt_logprobs_computes_its_prompt():
    rig = Rig()
    rig.add("a")
    rig.add("b", fork_of="a", sampling_params=SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert rows_of(rig.step())["b"] == (0, 10)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_token_ids": PROMPT[:-1]}, "fork_of"),
        ({"cache_salt": "other"}, "cache_salt"),
        ({"lora_name": "other"}, "lora_name"),
    ],
)
def test_a_fork_that_may_not_share_is_refused_by_name(fields, param):
    rig = Rig()
    rig.add("a")
    before = rig.scheduler.stats()
    with pytest.raises(InvalidRequestError) as caught:
        rig.add("b", fork_of="a", **fields)
    assert caught.value.param == param
    assert rig.scheduler.stats() == before


# --- beams --------------------------------------------------------------------------------------------------------


def child_of(request_id, prompt, max_tokens=3, **kwargs):
    return EngineCoreRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), **kwargs)


def test_a_beam_goes_on_where_its_parent_is_and_the_parent_may_go_at_once():
    rig = Rig()
    rig.add("parent")
    rig.step()
    rig.step()
    text = PROMPT + rig.answers["parent"]
    assert rig.scheduler.fork_request("parent", child_of("left", [*text[:-1], 7])) == 11
    assert rig.scheduler.fork_request("parent", child_of("right", [*text[:-1], 8])) == 11
    rig.scheduler.abort_requests(["parent"])
    scheduled = rig.step()
    assert rows_of(scheduled) == {"left": (11, 1), "right": (11, 1)}
    assert len(scheduled.block_copies) == 2
    assert [request.request_id for request in scheduled.new_requests] == ["left", "right"]
    assert rig.scheduler.stats().num_forks == 2
    rig.finish()
    assert rig.answers["left"] == continuation([*text[:-1], 7], 3)
    assert rig.answers["right"] == continuation([*text[:-1], 8], 3)


def test_a_beam_search_over_the_scheduler_finds_what_one_over_the_model_finds():
    def choices(text):
        return [(next_token([*text, rank]), -rank) for rank in range(1, 3)]

    rig, width = Rig(num_blocks=40), 2
    beams = [(0, PROMPT)]
    rig.add("0", max_tokens=9)
    names = {tuple(PROMPT): "0"}
    rig.step()
    for depth in range(5):
        grown = sorted(((score + s, [*text, t]) for score, text in beams for t, s in choices(text)), reverse=True)
        beams, parents = grown[:width], names
        names = {}
        for number, (_, text) in enumerate(beams):
            names[tuple(text)] = f"{depth}-{number}"
            shared = rig.scheduler.fork_request(parents[tuple(text[:-1])], child_of(names[tuple(text)], text, 9))
            assert shared == len(text) - 1
        rig.scheduler.abort_requests(parents.values())
        rig.step()
    assert rig.answers[names[tuple(beams[0][1])]] == continuation(beams[0][1], 1)
    rig.scheduler.abort_requests(names.values())
    rig.finish()


def test_without_a_row_or_a_block_a_beam_waits_and_computes():
    rig = Rig(max_num_seqs=1)
    rig.add("parent")
    rig.step()
    assert rig.scheduler.fork_request("parent", child_of("child", [*PROMPT, 7])) == 0
    assert [request.status for request in rig.scheduler.waiting] == [RequestStatus.WAITING]
    rig.finish()
    assert rig.answers["child"] == continuation([*PROMPT, 7], 3)
    rig = Rig(num_blocks=4)
    rig.add("parent", max_tokens=6)
    for _ in range(4):
        rig.step()
    assert rig.scheduler.fork_request("parent", child_of("child", [*PROMPT, 7])) == 0
    rig.finish()


def test_a_beam_preempted_before_the_runner_knew_it_is_never_mentioned_as_removed():
    rig = Rig(num_blocks=5)
    rig.add("parent", max_tokens=10)
    rig.step()
    rig.step()
    rig.step()  # the parent's third block is full
    assert rig.scheduler.fork_request("parent", child_of("child", [*PROMPT, rig.answers["parent"][0], 7], 3)) == 11
    assert rig.manager.num_free_blocks == 1
    rig.add("late", prompt_token_ids=[1], max_tokens=1)
    rig.finish()
    text = [*PROMPT, rig.answers["parent"][0], 7]
    assert rig.answers["child"] == continuation(text, 3)


def test_a_beam_that_is_aborted_at_once_leaves_nothing():
    rig = Rig()
    rig.add("parent")
    rig.step()
    num_free_blocks = rig.manager.num_free_blocks
    rig.scheduler.fork_request("parent", child_of("child", [*PROMPT, 7]))
    rig.scheduler.abort_requests(["child"])
    assert rig.manager.num_free_blocks == num_free_blocks
    scheduled = rig.step()
    assert (scheduled.block_copies, scheduled.removed_request_ids) == ([], [])


@pytest.mark.parametrize(
    ("parent_id", "child", "param"),
    [
        ("nobody", child_of("x", [1]), "parent_id"),
        ("parent", child_of("x", [1], cache_salt="other"), "cache_salt"),
        ("parent", child_of("parent", [1]), "request_id"),
        ("parent", child_of("x", []), "prompt"),
        ("parent", child_of("x", [1], max_tokens=1000), "prompt"),
    ],
)
def test_a_beam_that_cannot_be_is_refused_by_name(parent_id, child, param):
    rig = Rig()
    rig.add("parent")
    rig.step()
    before = rig.scheduler.stats()
    with pytest.raises(InvalidRequestError) as caught:
        rig.scheduler.fork_request(parent_id, child)
    assert caught.value.param == param
    assert rig.scheduler.stats() == before
