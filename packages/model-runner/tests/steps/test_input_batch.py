"""The persistent rows."""

from __future__ import annotations

import numpy as np
import pytest

from llmstack_model_runner.steps.input_batch import InputBatch, InputBatchError
from llmstack_types import MediaItem, NewRequest, SamplingParams, ScheduledRequest, SchedulerOutput


def make_batch(max_num_rows: int = 3) -> InputBatch:
    return InputBatch(max_num_rows, max_model_len=64, block_size=4, num_blocks=20, vocab_size=50)


def new(request_id: str, num_tokens: int = 5, **kwargs: object) -> NewRequest:
    values: dict[str, object] = {"num_prompt_tokens": num_tokens, "sampling_params": SamplingParams(), **kwargs}
    return NewRequest(request_id, list(range(num_tokens)), **values)  # type: ignore[arg-type]  # test values


def tokens_of(batch: InputBatch, row: int = 0) -> list[int]:
    return [int(token_id) for token_id in batch.token_ids[row, : batch.num_tokens[row]]]


def test_a_step_removes_before_it_adds_so_that_a_full_batch_can_be_replaced() -> None:
    batch = make_batch(max_num_rows=1)
    batch.add(new("a"))
    step = batch.update(
        SchedulerOutput(1, [new("b", 3)], [ScheduledRequest("b", 0, 3, [7])], removed_request_ids=["a"])
    )
    assert step.request_ids == ["b"]
    assert tokens_of(batch) == [0, 1, 2]
    assert len(batch) == 1


def test_rows_of_others_stay_where_they_are_on_removal() -> None:
    batch = make_batch()
    for request_id in "abc":
        batch.add(new(request_id))
    batch.remove("b")
    batch.add(new("d", 2))
    step = batch.update(SchedulerOutput(1, [], [ScheduledRequest(r, 0, 1, [block]) for block, r in enumerate("dca")]))
    assert step.rows.tolist() == [1, 2, 0]


def test_a_reused_row_starts_with_an_empty_block_table() -> None:
    batch = make_batch(max_num_rows=1)
    batch.update(SchedulerOutput(1, [new("a")], [ScheduledRequest("a", 0, 5, [3, 4])]))
    with pytest.raises(InputBatchError, match="blocks for 4"):
        batch.update(SchedulerOutput(2, [new("b")], [ScheduledRequest("b", 0, 5, [9])], ["a"]))


def test_appended_tokens_become_schedulable() -> None:
    batch = make_batch()
    step = batch.update(SchedulerOutput(1, [new("a", 3)], [ScheduledRequest("a", 0, 3, [0])]))
    batch.append_tokens(step.rows, np.array([42]), np.array([1]))
    assert tokens_of(batch) == [0, 1, 2, 42]
    batch.update(SchedulerOutput(2, [], [ScheduledRequest("a", 3, 1, [])]))


def test_a_token_in_flight_has_a_reserved_place() -> None:
    batch = make_batch()
    step = batch.update(SchedulerOutput(1, [new("a", 3)], [ScheduledRequest("a", 0, 3, [0])]))
    reservation = batch.reserve(step.rows)
    batch.update(SchedulerOutput(2, [], [ScheduledRequest("a", 3, 1, [])]))
    later = batch.reserve(step.rows)
    batch.fill(reservation, np.array([42]))
    batch.fill(later, np.array([43]))
    assert tokens_of(batch) == [0, 1, 2, 42, 43]


@pytest.mark.parametrize("other", [[], [new("b", 6)]], ids=["freed", "reused"])
def test_a_row_with_another_request_is_not_filled(other: list[NewRequest]) -> None:
    batch = make_batch(max_num_rows=1)
    step = batch.update(SchedulerOutput(1, [new("a", 3)], [ScheduledRequest("a", 0, 3, [0])]))
    reservation = batch.reserve(step.rows)
    batch.update(SchedulerOutput(2, other, [], ["a"]))
    before = batch.token_ids.copy()
    batch.fill(reservation, np.array([42]))
    assert np.array_equal(batch.token_ids, before)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (new("a"), "has a row for it already"),
        (new("b", 65), "takes 1 to 64"),
        (new("b", 0), "takes 1 to 64"),
        (new("b", num_prompt_tokens=6), "takes 1 to 64"),
        (new("b", lora_name="style"), "adapter 'style'"),
        (new("b", 51), "outside"),
    ],
)
def test_a_request_that_no_row_can_hold_is_refused(request_: NewRequest, text: str) -> None:
    batch = make_batch()
    batch.add(new("a"))
    with pytest.raises(InputBatchError, match=text):
        batch.add(request_)
    assert len(batch) == 1


def test_more_requests_than_rows_are_refused() -> None:
    batch = make_batch(max_num_rows=1)
    batch.add(new("a"))
    with pytest.raises(InputBatchError, match="all 1 rows"):
        batch.add(new("b"))


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (ScheduledRequest("x", 0, 1, [1]), "'x' is scheduled, but"),
        (ScheduledRequest("a", 0, 6, [1, 2]), "6 tokens from 0 on, but has 5"),
        (ScheduledRequest("a", 4, 0, [1, 2]), "0 tokens from 4"),
        (ScheduledRequest("a", -1, 1, [1]), "from -1"),
        (ScheduledRequest("a", 0, 5, [1]), "blocks for 4"),
        (ScheduledRequest("a", 0, 5, [1, 20]), "block id outside"),
        (ScheduledRequest("a", 0, 5, [1, -1]), "block id outside"),
        (ScheduledRequest("a", 0, 5, [1] * 18), "more than its length needs"),
    ],
)
def test_a_step_that_contradicts_the_rows_is_refused_by_name(row: ScheduledRequest, text: str) -> None:
    batch = make_batch()
    batch.add(new("a"))
    with pytest.raises(InputBatchError, match=text):
        batch.update(SchedulerOutput(1, [], [row]))


def test_a_step_knows_how_many_tokens_of_a_row_are_left() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(1, [new("a"), new("b"), new("c")]))
    rows = [
        ScheduledRequest("a", 0, 2, [0, 1]),
        ScheduledRequest("b", 0, 5, [2, 3]),
        ScheduledRequest("c", 0, 7, [4, 5], [8, 9]),
    ]
    step = batch.update(SchedulerOutput(2, scheduled_requests=rows))
    assert step.num_left.tolist() == [3, 0, 0]
    assert step.num_tokens == 14


def test_removing_an_unknown_request_is_refused_by_name() -> None:
    with pytest.raises(InputBatchError, match="'gone'"):
        make_batch().remove("gone")


def test_a_request_twice_in_a_step_is_refused() -> None:
    batch = make_batch()
    batch.add(new("a"))
    rows = [ScheduledRequest("a", 0, 1, [1]), ScheduledRequest("a", 1, 1, [])]
    with pytest.raises(InputBatchError, match="twice"):
        batch.update(SchedulerOutput(1, [], rows))


def test_items_of_a_prompt_are_kept_with_their_row_and_ids_at_given_vectors_are_not_penalised() -> None:
    batch = make_batch()
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    given, picture = MediaItem(bytes(32), "embeds", 1, 3), MediaItem(bytes(32), "image", 0, 2, num_units=1)
    for request_id, media in (("ids", ()), ("vectors", ((5, given),)), ("picture", ((6, picture),))):
        batch.add(new(request_id, media=media, sampling_params=params))
    assert batch.media == {1: ((5, given),), 2: ((6, picture),)}
    metadata = batch.sampling.metadata(np.array([0, 1, 2]), np.array([0, 0, 0]))
    assert metadata.penalties is not None
    assert metadata.penalties.entries.rows.tolist() == [*[0] * 5, *[1] * 2, *[2] * 5]
    batch.remove("vectors")
    assert list(batch.media) == [2]
