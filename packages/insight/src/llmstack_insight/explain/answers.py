"""Names of the requests in the engine core that make up one answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from llmstack_engine_core.admission import BEAM_MARK
from llmstack_insight.explain.history import end_of
from llmstack_step_log.seek import ANY_SUFFIX
from llmstack_types import StepRecording


def _pattern_of(answer_id: str) -> re.Pattern[str]:
    """Its group is what the server adds to an id that begins with what the client gave."""
    suffix = "(-[0-9a-f]{32})?" if "-" in answer_id else "()"
    return re.compile(rf"(?:\d+_)?{re.escape(answer_id)}{suffix}(?:-\d+)?(?:{BEAM_MARK}\d+)?")


def part_matcher(answer_id: str) -> Callable[[str], bool]:
    """Whether a request is the answer of this id, or one of its completions (`1_ID`), prompts (`ID-1`) and beams."""
    pattern = _pattern_of(answer_id)
    return lambda request_id: pattern.fullmatch(request_id) is not None


def search_of(request_id: str) -> str:
    """The beam search of a beam; any other request is its own."""
    return request_id.partition(BEAM_MARK)[0]


def parts_of(answer_id: str, request_ids: Iterable[str]) -> list[str]:
    """The requests of an answer, each once, and a beam search as one; the one with the id of the answer is all of it.

    A client may give the same id again: then these are the requests of the last answer with it.
    """
    named = dict.fromkeys(map(search_of, request_ids))
    if answer_id in named:
        return [answer_id]
    pattern = _pattern_of(answer_id)
    part_to_suffix = {name: match[1] for name in named if (match := pattern.fullmatch(name))}
    last = next(reversed(part_to_suffix.values()), None)
    return [name for name, suffix in part_to_suffix.items() if suffix == last]


def parts_in(log: StepRecording, answer_id: str, tenant: str | None = None) -> list[str]:
    """The requests of an answer that a log has; with `tenant` only those of that one."""
    came = [event.request_id for event in log.events]
    names = dict.fromkeys((*came, *(row.request_id for record in log.steps for row in record.rows)))
    return parts_of(answer_id, (one for one in names if tenant is None or log.tenants.get(one) == tenant))


def last_part(log: StepRecording, parts: Sequence[str]) -> tuple[str, float]:
    """The request that ended last, or was last in a step, and when; the first one of several at once."""
    part_to_end = dict.fromkeys(parts, 0.0)
    for record in log.steps:
        names = {search_of(row.request_id) for row in record.rows}
        part_to_end |= dict.fromkeys(names.intersection(part_to_end), end_of(record))
    return max(part_to_end.items(), key=lambda pair: pair[1])


def first_names(answer_id: str) -> tuple[str, ...]:
    """The names that the first request of an answer may have; `ANY_SUFFIX` stands for any end."""
    answers = (answer_id, answer_id + ANY_SUFFIX) if "-" in answer_id else (answer_id,)
    prompts = [name + number for name in answers for number in ("", "-0")]
    completions = [*prompts, *(f"0_{name}" for name in prompts)]
    return (*completions, *(f"{name}{BEAM_MARK}1" for name in completions))
