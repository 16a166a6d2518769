"""Names of the requests in the engine core that make up one answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from llmstack_engine_core.admission import BEAM_MARK
from llmstack_engine_core.explain.history import end_of
from llmstack_types import StepRecording


def part_matcher(answer_id: str) -> Callable[[str], bool]:
    """Whether a request is the answer of this id, or one of its completions (`1_ID`), prompts (`ID-1`) and beams."""
    pattern = re.compile(rf"(?:\d+_)?{re.escape(answer_id)}(?:-\d+)?(?:{BEAM_MARK}\d+)?")
    return lambda request_id: pattern.fullmatch(request_id) is not None


def parts_of(answer_id: str, request_ids: Iterable[str]) -> list[str]:
    """The requests of an answer, each once; the one with the id of the answer is all of it."""
    named = dict.fromkeys(request_ids)
    return [answer_id] if answer_id in named else list(filter(part_matcher(answer_id), named))


def parts_in(log: StepRecording, answer_id: str) -> list[str]:
    """The requests of an answer that a log has."""
    came = (event.request_id for event in log.events)
    return parts_of(answer_id, (*came, *(row.request_id for record in log.steps for row in record.rows)))


def last_part(log: StepRecording, parts: Sequence[str]) -> tuple[str, float]:
    """The request that ended last, or was last in a step, and when; the first one of several at once."""
    part_to_end = dict.fromkeys(parts, 0.0)
    for record in log.steps:
        part_to_end |= {row.request_id: end_of(record) for row in record.rows if row.request_id in part_to_end}
    return max(part_to_end.items(), key=lambda pair: pair[1])


def first_names(answer_id: str) -> tuple[str, ...]:
    """Names of which every answer that a log has bears one, as its first request."""
    prompts = (answer_id, f"{answer_id}-0")
    return (*prompts, *(f"0_{name}" for name in prompts), *(f"{name}{BEAM_MARK}1" for name in prompts))
