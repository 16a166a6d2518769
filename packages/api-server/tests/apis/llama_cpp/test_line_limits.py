"""Ends of answers at their lines, however the text comes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.apis.llama_cpp.line_limits import LineLimits


@given(st.text("a \t\n", max_size=40), st.integers(-1, 4), st.integers(1, 9))
def test_a_line_with_less_indentation_is_the_end(text: str, min_indent: int, size: int) -> None:
    limits, taken = LineLimits(min_indent, 0), ""
    for start in range(0, len(text), size):
        taken += limits.take(text[start : start + size], 1e9)
        if limits.is_over:
            break
    wrong = re.search(rf"(?<=\n)[ \t]{{0,{max(min_indent - 1, 0)}}}(?![ \t])(?!\Z)", text) if min_indent > 0 else None
    end = None if wrong is None else wrong.end()
    assert (taken, limits.is_over) == (text[:end], end is not None)


@pytest.mark.parametrize(("max_ms", "num_taken"), [(0, 5), (-1, 5), (1, 2), (25, 4), (100, 5)])
def test_after_the_time_the_next_end_of_a_line_is_the_end(max_ms: int, num_taken: int) -> None:
    limits = LineLimits(0, max_ms)
    taken = []
    for number, piece in enumerate(("a", "b\n", "c", "d\ne", "f")):
        taken.append(limits.take(piece, 10.0 * number))
        if limits.is_over:
            break
    assert taken == ["a", "b\n", "c", "d\ne", "f"][:num_taken]
