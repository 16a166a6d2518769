"""Patterns whose work is counted, beside those of `re`."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_output_parsers.pattern_steps import Work, WorkLimitError
from llmstack_output_parsers.pattern_syntax import MAX_INSTRUCTIONS, PatternError
from llmstack_output_parsers.patterns import Pattern

ONE = st.sampled_from(["a", "b", "<", " ", ".", r"\w", r"\s", "[^<]", "[a-c ]", r"\d", "[^a]", "ab", r"\b", "$", "^"])
REPEATS = st.sampled_from(["", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{1,2}?"])


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.tuples(parts, REPEATS).map(lambda pair: f"(?:{pair[0]}){pair[1]}")
    either = st.tuples(parts, parts).map(lambda pair: f"(?:{pair[0]}|{pair[1]})")
    ahead = parts.map(lambda part: f"(?={part})") | parts.map(lambda part: f"(?!{part})")
    return st.lists(group | either | ahead | parts, min_size=1, max_size=3).map("".join)


SINGLE = st.tuples(ONE, REPEATS).map(lambda pair: pair[0] if pair[0] in ("^", "$", r"\b") else "".join(pair))
PATTERNS = st.recursive(SINGLE, joined, max_leaves=6)
TEXTS = st.text(alphabet="abc <1_\n", max_size=14)


def found(pattern: Pattern, text: str, start: int = 0) -> tuple[tuple[int, int] | None, bool]:
    match, is_decided = pattern.match(text, start, Work(1000))
    return None if match is None else (match.start, match.end), is_decided


@settings(max_examples=500, deadline=None)
@given(PATTERNS, TEXTS)
def test_matches_are_those_of_re(pattern: str, text: str) -> None:
    own, theirs = Pattern(pattern), re.compile(pattern, re.DOTALL)
    for start in range(len(text) + 1):
        match = theirs.match(text, start)
        if "^" not in pattern:  # which `re` takes for the start of the search
            assert found(own, text, start)[0] == (match and match.span())
    if all(match.end() > match.start() for match in theirs.finditer(text)):
        assert [one[:2] for one in own.find_all(text) if one.end > one.start] == [
            match.span() for match in theirs.finditer(text)
        ]


@settings(max_examples=300, deadline=None)
@given(PATTERNS, TEXTS, TEXTS)
def test_more_text_changes_nothing_that_is_decided(pattern: str, text: str, more: str) -> None:
    own = Pattern(pattern)
    before, is_decided = found(own, text)
    if is_decided:
        assert found(own, text + more)[0] == before


def test_groups_are_those_that_took_part() -> None:
    pattern = r"<f=(?P<name>\w+)>\s*(?P<value>.*?)\s*</f>(?:;(?P<note>\w+))?"
    text = "<f=a> 1\n2 </f><f=b></f>;c"
    assert [one.groups for one in Pattern(pattern).find_all(text)] == [
        {"name": "a", "value": "1\n2"}, {"name": "b", "value": "", "note": "c"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(?:a|a)*b", "a" * 64),
        (r"(?:a*)*b", "a" * 64),
        (r"<p=(\w+)>\s*(.*?)\s*[<;]/p>", "<p=a>" + " " * 3000),
        (r"(?:\w+\s?)+!", "word " * 50),
    ],
)
def test_what_takes_too_many_steps_is_given_up_by_their_number(pattern: str, text: str) -> None:
    with pytest.raises(WorkLimitError):
        list(Pattern(pattern).find_all(text))


@pytest.mark.parametrize("value", ["x" * 65_000, ("    " * 5 + "return 1\n") * 2200, "a < b\n" * 10_000])
def test_a_long_value_has_the_steps_that_it_needs(value: str) -> None:
    pattern = Pattern(r"<p=(?P<key>\w+)>\s*(?P<value>.*?)\s*</p>")
    (one,) = pattern.find_all(f"<p=a>\n{value}\n</p>")
    assert one.groups == {"key": "a", "value": value.strip()}


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "missing"),
        (r"(a)\1", "groupref is not supported"),
        ("(?<=a)b", "assert is not supported"),
        ("(?i)a", "flags"),
        ("(?i:a)", "subpattern is not supported"),
        (f"(?:ab){{{MAX_INSTRUCTIONS}}}c{{2}}(?:de){{2}}", "too long"),
    ],
)
def test_a_pattern_that_is_not_supported_is_named(pattern: str, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        Pattern(pattern)
