"""Rows of a step and their states: what is refused, and what follows from a row that has failed."""

from __future__ import annotations

import pytest

from llmstack_model_runner.steps.input_batch import InputBatch, InputBatchError, StepRows
from llmstack_model_runner.steps.prepare_inputs import lay_out
from llmstack_model_runner.steps.unwritten_blocks import UnwrittenBlocks
from llmstack_types import NewRequest, SamplingParams, ScheduledRequest, SchedulerOutput

NUM_STATE_BLOCKS = 7


def batch() -> InputBatch:
    made = InputBatch(4, 64, 4, 20, 100, num_state_blocks=NUM_STATE_BLOCKS)
    for name in "ab":
        made.add(NewRequest(name, [1] * 8, 8, SamplingParams()))
    return made


def step(made: InputBatch, states: list[tuple[int, int]], start: int = 0, blocks: bool = True) -> StepRows:
    rows = [
        ScheduledRequest(name, start, 4, [2 * number, 2 * number + 1] if blocks else [])
        for number, name in enumerate("ab"[: len(states)])
    ]
    return made.update(SchedulerOutput(1, scheduled_requests=rows, states=states))


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([(0, 1), (0, 1)], "written by two rows"),
        ([(0, 1), (1, 2)], "read by one and written by one"),
        ([(0, 0)], "outside"),
        ([(0, NUM_STATE_BLOCKS)], "outside"),
        ([(-1, 2)], "outside"),
    ],
)
def test_states_that_rows_cannot_have_are_refused(states: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(InputBatchError, match=words):
        step(batch(), states)


def test_a_step_without_states_is_refused() -> None:
    row = ScheduledRequest("a", 0, 4, [0, 1])
    with pytest.raises(InputBatchError, match="a step of 1 rows has the states of 0"):
        batch().update(SchedulerOutput(1, scheduled_requests=[row]))


def test_a_row_that_would_go_on_from_a_state_of_a_failed_row_is_found() -> None:
    made, unwritten = batch(), UnwrittenBlocks()
    unwritten.follow(SchedulerOutput(1))
    unwritten.add(made, step(made, [(0, 5)]))
    unwritten.on_device.clear()  # its keys and values were written by another row since
    assert unwritten.has_any
    unwritten.follow(SchedulerOutput(2))
    ahead = step(made, [(3, 4), (5, 6)])
    assert unwritten.readers(made, ahead) == [1]
    assert set(unwritten.states) == {5, 6}  # and no row reads what it would have written


def test_a_state_block_that_is_written_again_can_be_read() -> None:
    made, unwritten = batch(), UnwrittenBlocks()
    unwritten.follow(SchedulerOutput(1))
    unwritten.add(made, step(made, [(0, 5)]))
    unwritten.on_device.clear()
    assert unwritten.readers(made, step(made, [(0, 5)], blocks=False)) == []
    assert not unwritten.has_any


def test_failed_states_are_forgotten_after_a_few_steps() -> None:
    made, unwritten = batch(), UnwrittenBlocks()
    unwritten.add(made, step(made, [(0, 5)]))
    for number in range(6):
        unwritten.follow(SchedulerOutput(number))
    assert not unwritten.has_any


def held(num_held_tokens: int) -> InputBatch:
    """A batch whose second request has the keys and values of so many tokens from another one."""
    made = InputBatch(4, 64, 4, 20, 100, num_state_blocks=NUM_STATE_BLOCKS)
    made.add(NewRequest("a", [1] * 8, 8, SamplingParams()))
    made.add(NewRequest("b", [1] * 8, 8, SamplingParams(), num_held_tokens=num_held_tokens))
    return made


def test_keys_and_values_that_others_wrote_are_not_written_again() -> None:
    made = held(4)
    rows = [ScheduledRequest("a", 0, 6, [3, 4]), ScheduledRequest("b", 2, 5, [3, 5])]
    laid_out = lay_out(made, made.update(SchedulerOutput(1, scheduled_requests=rows, states=[(0, 1), (2, 3)])))
    assert laid_out.slot_mappings[0].tolist() == [12, 13, 14, 15, 16, 17, -1, -1, 20, 21, 22]


@pytest.mark.parametrize(("num_held_tokens", "readers"), [(4, [0]), (0, [])])
def test_a_row_that_computes_tokens_of_a_failed_row_without_writing_them_is_found(
    num_held_tokens: int, readers: list[int]
) -> None:
    """With blocks of its own, which it writes from their start, it would be right."""
    made, unwritten = held(num_held_tokens), UnwrittenBlocks()
    unwritten.on_device = {3: 0}
    row = ScheduledRequest("b", 0, 6, [3, 4])
    assert (
        unwritten.readers(made, made.update(SchedulerOutput(1, scheduled_requests=[row], states=[(0, 2)]))) == readers
    )
    assert (3 in unwritten.on_device) == bool(readers)
