"""What a draft model has written of rows and blocks, by the steps alone."""

import numpy as np
import pytest

from llmstack_model_runner.drafts.written_tokens import WrittenTokens
from llmstack_model_runner.steps.input_batch import InputBatch
from llmstack_types import NewRequest, SamplingParams, ScheduledRequest, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0)


class Rows:
    """A batch of one group of blocks of 4 tokens, and what is written of it."""

    def __init__(self):
        self.batch = InputBatch(4, 64, 4, 32, 97)
        self.written = WrittenTokens(self.batch, 0, 32, 3)

    def step(self, *rows, new=(), removed=(), **copies):
        scheduled = SchedulerOutput(0, list(new), list(rows), list(removed), **copies)
        step = self.batch.update(scheduled)
        self.written.follow(scheduled, step)
        return step.rows

    def begin(self, request_id, num_tokens, block_ids, num_found=0, **copies):
        request = NewRequest(request_id, list(range(num_tokens)), num_tokens, GREEDY)
        row = ScheduledRequest(request_id, num_found, num_tokens - num_found, block_ids)
        return self.step(row, new=[request], **copies)

    def num_written(self, rows):
        return self.written.of_rows(rows).tolist()


def test_a_row_that_finds_blocks_has_what_was_written_of_them():
    rows = Rows()
    first = rows.begin("a", 11, [1, 2, 3])
    assert rows.num_written(first) == [0]
    rows.written.note(first, np.array([9]))
    assert rows.num_written(first) == [9]
    assert rows.num_written(rows.begin("b", 11, [1, 2, 4], num_found=8)) == [8]
    assert rows.num_written(rows.begin("c", 8, [1, 2], num_found=4)) == [4]  # block 2 has other tokens now


def test_one_token_is_always_left_to_compute():
    rows = Rows()
    first = rows.begin("a", 9, [1, 2, 3])
    rows.written.note(first, np.array([9]))
    assert rows.num_written(first) == [8]
    rows.step(removed=["a"])
    assert rows.num_written(rows.begin("b", 8, [1, 2, 3], num_found=7)) == [4]


@pytest.mark.parametrize("copies", [{"swap_ins": [(0, 1)]}, {"block_copies": [(7, 1)]}], ids=str)
def test_what_is_copied_into_a_block_is_not_written_by_the_draft_model(copies):
    rows = Rows()
    rows.written.note(rows.begin("a", 9, [1, 2, 3]), np.array([8]))
    rows.step(removed=["a"])
    assert rows.num_written(rows.begin("b", 9, [1, 2, 3], num_found=8, **copies)) == [0]


def test_what_comes_from_elsewhere_is_not_written_by_it():
    rows = Rows()
    rows.written.note(rows.begin("a", 9, [1, 2, 3]), np.array([8]))
    rows.written.forget([2])
    assert rows.num_written(rows.begin("b", 9, [1, 2, 4], num_found=8)) == [4]


@pytest.mark.parametrize(("sampled", "num_written"), [([7], 5), ([50, 7], 6), ([50, 51, 7], 7), ([50, 51, 52, 7], 7)])
def test_drafts_that_were_right_are_written(sampled, num_written):
    rows = Rows()
    first = rows.begin("a", 5, [1, 2, 3])
    assert rows.num_written(first) == [0]
    rows.written.note(first, np.array([5]))
    rows.written.note_guesses(first, np.array([[50, 51, 52]]), np.array([2]))  # the last one was not fed back
    rows.batch.append_tokens(first, np.array(sampled), np.array([len(sampled)]))
    assert rows.num_written(first) == [num_written]


def test_a_row_that_has_another_request_begins_again():
    rows = Rows()
    first = rows.begin("a", 5, [1, 2])
    rows.written.note(first, np.array([5]))
    rows.step(removed=["a"])
    second = rows.begin("b", 5, [3, 4])
    assert second.tolist() == first.tolist()
    assert rows.num_written(second) == [0]
