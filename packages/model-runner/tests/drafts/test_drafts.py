"""Drafts of a step, filled in by a draft model."""

import pytest

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import write_gpt2_checkpoint
from llmstack_types import (
    ModelRunnerConfig,
    NewRequest,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)
from llmstack_types.scheduler_output import DRAFT_TO_MAKE

PROMPT = [5, 3, 9, 2, 8, 1, 7, 7, 4, 6]
GREEDY = SamplingParams(temperature=0.0)
TO_MAKE = [DRAFT_TO_MAKE] * 3


@pytest.fixture
def model_path(tmp_path):
    return str(write_gpt2_checkpoint(tmp_path, seed=5))


def make_runner(model_path, **changes):
    values = {"max_model_len": 64, "max_num_batched_tokens": 32, "draft_model_path": model_path, "max_num_drafts": 3}
    config = ModelRunnerConfig(model_path, max_num_seqs=4, block_size=4, device="cpu", **(values | changes))
    runner = ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(32)
    return runner


def sample(runner, *rows, new=(), token_masks=None):
    scheduled = SchedulerOutput(0, list(new), list(rows), [], sum(row.num_scheduled_tokens for row in rows))
    return runner.execute_model(scheduled, token_masks).result().sampled_token_ids


def begin(runner, request_id="a", first_block=0):
    request = NewRequest(request_id, PROMPT.copy(), len(PROMPT), GREEDY)
    blocks = list(range(first_block, first_block + 4))
    return sample(runner, ScheduledRequest(request_id, 0, len(PROMPT), blocks), new=[request])[0]


def test_the_served_model_as_its_own_draft_model_is_always_right(model_path):
    runner = make_runner(model_path)
    begin(runner)
    (sampled,) = sample(runner, ScheduledRequest("a", 10, 4, [], TO_MAKE))
    assert len(sampled) == 4
    alone = make_runner(model_path, draft_model_path="", max_num_drafts=0)
    begin(alone)
    assert sampled == [sample(alone, ScheduledRequest("a", 10 + place, 1, []))[0][0] for place in range(4)]


@pytest.mark.parametrize(("longest", "num_sampled"), [(13, 3), (12, 2), (11, 1), (5, 1)])
def test_a_row_beyond_its_positions_has_fewer_drafts(model_path, longest, num_sampled):
    runner = make_runner(model_path, draft_max_model_len=longest)
    begin(runner)
    (sampled,) = sample(runner, ScheduledRequest("a", 10, 4, [], TO_MAKE))
    assert len(sampled) == num_sampled
    assert len(sample(runner, ScheduledRequest("a", 10 + num_sampled, 1, []))[0]) == 1


def test_prompts_are_read_within_the_tokens_of_a_step(model_path):
    runner = make_runner(model_path, max_num_batched_tokens=16)
    begin(runner)
    begin(runner, "b", 8)
    rows = [ScheduledRequest(name, 10, 4, [], TO_MAKE) for name in ("a", "b")]
    first, second = sample(runner, *rows)
    assert (len(first), len(second)) == (4, 1)  # 11 tokens of the first one, and 5 of the second
    rows = [ScheduledRequest("a", 14, 1, []), ScheduledRequest("b", 11, 4, [], TO_MAKE)]
    assert [len(sampled) for sampled in sample(runner, *rows)] == [1, 4]


def test_masks_are_made_for_the_drafts_that_were_made(model_path):
    from llmstack_types import TokenMasks

    runner, asked = make_runner(model_path, draft_max_model_len=13), []
    begin(runner)

    def make_masks(drafts_made=(), /):
        asked.append(drafts_made)
        return TokenMasks(["a"], bytearray(b"\xff" * (16 * (1 + len(drafts_made["a"])))))

    (sampled,) = sample(runner, ScheduledRequest("a", 10, 4, [], TO_MAKE), token_masks=make_masks)
    assert asked == [{"a": sampled[:2]}]


def test_a_storage_that_was_freed_is_read_again(model_path):
    runner = make_runner(model_path)
    begin(runner)
    sample(runner, ScheduledRequest("a", 10, 4, [], TO_MAKE))
    runner.sleep(2)
    runner.wake_up()
    begin(runner)
    assert len(sample(runner, ScheduledRequest("a", 10, 4, [], TO_MAKE))[0]) == 4
