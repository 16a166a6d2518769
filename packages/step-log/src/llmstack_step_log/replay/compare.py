"""Search for the first decision that differs between two sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from llmstack_step_log.decisions import (
    FORKED,
    IMPORTED,
    REFUSED,
    RESET,
    SCHEDULED,
    UPDATED,
    scheduled_rows,
    unpack_decision,
    updated_rows,
)
from llmstack_step_log.replay.derive import Decision

MAX_LINES = 16
MAX_CELL = 60

Lines = dict[str, str]
"""The lines of one side: the name of a line to its text."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that is not the same; None stands for a side that has no more to decide."""

    ours: Decision | None
    theirs: Decision | None


def first_difference(ours: Iterable[Decision], theirs: Iterable[Decision]) -> tuple[int, Difference | None]:
    """The number of equal decisions, and the first difference. Goes no further than that one."""
    num_equal = 0
    for one, other in zip_longest(ours, theirs):
        if one is None or other is None or one.packed != other.packed:
            return num_equal, Difference(one, other)
        num_equal += 1
    return num_equal, None


def describe(difference: Difference, our_name: str, their_name: str) -> str:
    """A table of both sides with the lines in which they differ."""
    ours, theirs = _lines(difference.ours), _lines(difference.theirs)
    names = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
    rows = [("", our_name, their_name)]
    rows += [(name, ours.get(name, "-"), theirs.get(name, "-")) for name in names[:MAX_LINES]]
    widths = [max(len(_cut(row[column])) for row in rows) for column in range(2)]
    table = [
        f"  {_cut(name):<{widths[0]}}  {_cut(one):<{widths[1]}}  {_cut(other)}".rstrip() for name, one, other in rows
    ]
    if len(names) > MAX_LINES:
        table.append(f"  and {len(names) - MAX_LINES} lines more")
    return "\n".join(table)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}..."


def _lines(decision: Decision | None) -> Lines:
    if decision is None:
        return {"decision": "none, the run is over"}
    kind, decided = unpack_decision(decision.packed)
    return dict(_DESCRIBERS.get(kind, _describe_unknown)(decided))


def _describe_scheduled(decided: dict[str, Any]) -> Iterator[tuple[str, str]]:
    rows = scheduled_rows(decided)
    new = [name for name, *_ in decided.get("new_requests", ())]
    yield "decision", f"step {decided.get('step')}"
    yield "rows", f"{len(rows)}, {decided.get('total_num_scheduled_tokens', 0)} tokens"
    yield "new", ", ".join(new) or "-"
    yield "removed", ", ".join(decided.get("removed_request_ids", ())) or "-"
    for request_id, num_computed, num_scheduled, block_ids, *more in rows:
        text = f"tokens {num_computed} to {num_computed + num_scheduled - 1}"
        if block_ids:
            text += f", new blocks {' '.join(map(str, block_ids))}"
        yield request_id, text + "".join(f", {item}" for item in more if item)
    for name, value in decided.items():
        if name not in ("step", "scheduled_requests", "new_requests", "removed_request_ids"):
            yield name, str(value)


def _describe_updated(decided: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "decision", "the outputs of the step"
    for request_id, named in updated_rows(decided).items():
        yield request_id, ", ".join(f"{name} {value}" for name, value in named.items())


def _describe_refused(request_id: str) -> Iterator[tuple[str, str]]:
    yield "decision", f"request {request_id} is refused"


def _describe_forked(decided: tuple[str, int]) -> Iterator[tuple[str, str]]:
    request_id, num_tokens = decided
    yield "decision", f"request {request_id} begins with {num_tokens} tokens of another"


def _describe_reset(is_done: bool) -> Iterator[tuple[str, str]]:
    yield "decision", f"the prefix cache is {'' if is_done else 'not '}forgotten"


def _describe_imported(block_ids: list[int]) -> Iterator[tuple[str, str]]:
    yield "decision", f"imported tokens fill the blocks {block_ids}"


def _describe_unknown(decided: object) -> Iterator[tuple[str, str]]:
    yield "decision", str(decided)


_DESCRIBERS: dict[str, Callable[[Any], Iterator[tuple[str, str]]]] = {
    SCHEDULED: _describe_scheduled,
    UPDATED: _describe_updated,
    REFUSED: _describe_refused,
    FORKED: _describe_forked,
    RESET: _describe_reset,
    IMPORTED: _describe_imported,
}
