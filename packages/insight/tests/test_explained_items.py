"""What an explanation says of the items of a prompt, from steps that are made up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_core_helpers.steps import step_record

from llmstack_engine_core.admission import BEAM_MARK
from llmstack_insight.explain import Explanation, explain
from llmstack_types import (
    EncoderWork,
    MediaItem,
    RequestEvent,
    RequestStatus,
    ScheduledRequest,
    StepRecord,
    StepRecording,
)

CAT, DOG = (MediaItem(bytes([number]) * 32, "image", 4 * number, 4, num_units=10) for number in (0, 1))
SOUND = MediaItem(bytes(32), "audio", 8, 4, num_units=5)
Row = tuple[str, int, int]
"""Request, tokens before, tokens of the step."""


def step(number: int, rows: Sequence[Row], *work: tuple[int, int, int], **media: Sequence[MediaItem]) -> StepRecord:
    """A step of 10 ms at 10 ms times its number."""
    scheduled = [ScheduledRequest(name, before, count, [], []) for name, before, count in rows]
    numbered = {name: tuple(enumerate(items, 1)) for name, items in media.items()}
    made = step_record(number, scheduled, 0.01 * number, (0.0, 0.01, 0.0))
    return made._replace(encoder_work=[EncoderWork(*one) for one in work], media=numbered)


def explained(steps: Sequence[StepRecord], begun: int = 1, name: str = "r", row_name: str = "r") -> Explanation:
    states = (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED_STOPPED)
    times_s = (0.005, 0.01 * begun, steps[-1].start_s + 0.01)
    events = [RequestEvent(row_name, state, time_s) for state, time_s in zip(states, times_s, strict=True)]
    return explain(StepRecording(1.0, steps, events), name)


def test_items_that_are_encoded_before_the_first_row_have_a_part_of_the_time() -> None:
    steps = [
        step(1, [], (1, 0, 2)), step(2, [("other", 0, 9)], (1, 2, 2)),
        step(3, [("r", 0, 9)], (2, 0, 4), r=[CAT, DOG]), step(4, [("r", 9, 1)], (7, 0, 4)),
    ]  # fmt: skip
    found = explained(steps)
    assert found.facts["encoder_steps"] == 3
    assert (found.facts["media_encoded"], found.facts["encoder_units"]) == (2, 20)
    assert "Its 2 pictures have 8 vectors: 2 were encoded in 3 steps of 30 ms, 20 units." in found.sentences
    assert found.facts["spans_ms"]["encoder"] == pytest.approx(20)
    assert sum(found.facts["spans_ms"].values()) == pytest.approx(found.facts["total_ms"])
    assert "queue_cause" not in found.facts, "it was not in the queue while the encoder was at work for it"


def test_what_gave_way_is_encoded_again_and_said() -> None:
    steps = [
        step(1, [("r", 0, 2)], (1, 0, 4), r=[CAT]), step(2, [("other", 0, 9)], (2, 0, 4)),
        step(3, [("r", 2, 7)], (1, 0, 4)), step(4, [("r", 9, 1)], (1, 0, 4)),
    ]  # fmt: skip
    found = explained(steps)
    assert (found.facts["media_encoded_again"], found.facts["encoder_units"]) == (1, 20)
    assert "The encoder did 1 of these again: their vectors had to give way to others." in found.sentences


def test_items_of_several_kinds_and_places_are_counted() -> None:
    found = explained([step(1, [("r", 4, 8)], (3, 0, 4), r=[CAT, DOG, SOUND]), step(2, [("r", 12, 1)])])
    counts = [found.facts[f"media_{name}"] for name in ("items", "in_prefix_cache", "in_encoder_cache", "encoded")]
    assert counts == [3, 1, 1, 1]
    (sentence,) = (one for one in found.sentences if one.startswith("Its 3 items"))
    assert sentence.startswith(
        "Its 3 items have 12 vectors: the prefix cache held 1, and the encoder cache held 1, and 1"
    )


def test_a_wait_for_an_encoder_that_is_at_work_for_others_has_that_cause() -> None:
    busy = [step(number, [("other", number, 1)], (9, number, 1)) for number in range(6)]
    found = explained([*busy, step(6, [("r", 0, 9)], (1, 0, 4), r=[CAT]), step(7, [("r", 9, 1)])], begun=6)
    assert found.facts["queue_cause"] == "encoder"
    assert "the encoder was at work for others (--encoder-budget-units)" in " ".join(found.sentences)


def test_the_items_of_a_beam_search_are_those_of_its_first_beam() -> None:
    beam = f"r{BEAM_MARK}1"
    found = explained([step(1, [(beam, 0, 9)], (1, 0, 4), **{beam: [CAT]}), step(2, [(beam, 9, 1)])], row_name=beam)
    assert "Its picture has 4 vectors: it was encoded in 1 step of 10 ms, 10 units." in found.sentences


def test_a_prompt_without_items_has_no_figures_of_an_encoder() -> None:
    found = explained([step(1, [("r", 0, 9)], (1, 0, 4), other=[CAT]), step(2, [("r", 9, 1)])])
    assert not [name for name in found.facts if name.startswith(("media", "encoder"))]
    assert found.facts["spans_ms"]["encoder"] == 0
