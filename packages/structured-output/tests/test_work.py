"""A text whose grammar is slow to follow uses up its processor time, and others keep theirs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmstack_structured_output import ConstrainedRequests, ConstraintFailedError
from llmstack_structured_output.testing import BYTE_VOCAB_SIZE, EOS_TOKEN_ID
from llmstack_structured_output.work import MAX_SAVED_S, TOKEN_S, Work
from llmstack_types import StructuredOutputsParams

EOS = (EOS_TOKEN_ID,)
AMBIGUOUS = 'root ::= e\ne ::= e "+" e | e "*" e | e e | "(" e ")" | [a-z0-9 ] | e "," e | ""'
WIDE = 'root ::= s\ns ::= s s | "a" | s s s | s s s s'  # few items of the parser, each of which is looked up often


@pytest.fixture
def requests(folder: Path) -> ConstrainedRequests:
    return ConstrainedRequests(str(folder), BYTE_VOCAB_SIZE, num_threads=2)


def follow(requests: ConstrainedRequests, names: list[str], drafts: bytes) -> Iterator[int]:
    """Steps that add an `a` to each text."""
    for num_tokens in itertools.count():
        requests.masks([(name, drafts) for name in names])
        for name in names:
            requests.accept(name, b"a")
        yield num_tokens


def clock_of(*times: float) -> Iterator[float]:
    yield from times


def watched() -> Work:
    work = Work()
    work.is_watched = True
    return work


@pytest.mark.parametrize("drafts", [b"", b"aa"])
@pytest.mark.parametrize("grammar", [AMBIGUOUS, WIDE])
def test_an_ambiguous_grammar_ends_before_its_steps_take_long(
    requests: ConstrainedRequests, grammar: str, drafts: bytes
) -> None:
    requests.start("slow", StructuredOutputsParams(grammar=grammar), EOS)
    requests.start("quick", StructuredOutputsParams(regex="a*"), EOS)
    steps = follow(requests, ["quick", "slow"], drafts)
    with pytest.raises(ConstraintFailedError, match="takes too much processor time"):
        any(num_tokens > 250 for num_tokens in steps)  # there a single mask takes a second
    with pytest.raises(ConstraintFailedError, match="takes too much processor time"):
        requests.masks([("slow", b"")])
    assert requests._requests["quick"].matcher.num_tokens > 10
    requests.accept("quick", b"a" * 2000)
    assert any(requests.masks([("quick", b"")]))


def test_seconds_are_counted_from_the_second_call_of_a_slow_text() -> None:
    work, times = Work(), clock_of(0.0, 0.06, 0.06, 0.12)
    assert work.call(str, 5, clock=times.__next__) == "5"
    assert not work.is_watched
    work.is_watched = True
    for is_spent in (False, True):
        work.call(str, 5, clock=times.__next__)
        assert (work.is_spent, work.is_slow) == (is_spent, True)


def test_tokens_add_time_up_to_what_a_text_begins_with() -> None:
    work, times = (
        watched(),
        clock_of(0.0, MAX_SAVED_S + 2.5 * TOKEN_S, 0.0, MAX_SAVED_S * 0.99, 0.0, MAX_SAVED_S * 0.02),
    )
    work.earn(1000)
    work.call(str, clock=times.__next__)
    assert work.is_spent
    work.earn(2)
    assert work.is_spent
    work.earn(1)
    assert not work.is_spent
    work.earn(1000)
    work.call(str, clock=times.__next__)
    assert not work.is_spent
    work.call(str, clock=times.__next__)
    assert work.is_spent


def test_a_watch_ends_with_a_call_that_is_not_slow() -> None:
    work, times = watched(), clock_of(0.0, 1e-6, 0.0, 0.01)
    work.call(str, clock=times.__next__)
    work.end_watch()
    assert (work.is_watched, work.is_slow) == (False, False)
    work.is_watched = True
    work.call(str, clock=times.__next__)
    work.end_watch()
    assert (work.is_watched, work.is_slow) == (True, True)
