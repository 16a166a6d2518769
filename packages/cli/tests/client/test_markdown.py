"""Markdown on a terminal: styled the same however the text is cut, and never held back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_command.client.markdown import MarkdownStyle

BOLD, NOT_BOLD, CODE, NOT_CODE, RESET = "\x1b[1m", "\x1b[22m", "\x1b[36m", "\x1b[39m", "\x1b[0m"


def style(*pieces: str) -> str:
    styler = MarkdownStyle()
    return "".join(styler.add(piece) for piece in pieces) + styler.end()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a **strong** word", f"a {BOLD}strong{NOT_BOLD} word"),
        ("call `f(x)` now", f"call {CODE}f(x){NOT_CODE} now"),
        ("## Title\ntext", f"{BOLD}## Title{NOT_BOLD}\ntext"),
        ("2 * 3 and a*b", "2 * 3 and a*b"),
        ("issue #5", "issue #5"),
        ("```\na ** b `c`\n```\nd", f"{CODE}```\na ** b `c`\n```{NOT_CODE}\nd"),
        ("`a ** b`", f"{CODE}a ** b{NOT_CODE}"),
        ("an open **end", f"an open {BOLD}end{RESET}"),
    ],
)
def test_marks_become_styles(text: str, shown: str) -> None:
    assert style(text) == shown


@given(st.text("ab*`# \n", max_size=30), st.data())
def test_cutting_changes_nothing_and_no_letter_is_lost(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert style(*pieces) == style(text)
    plain = re.sub(r"\x1b\[\d+m", "", style(text))
    assert re.sub("[*`]", "", plain) == re.sub("[*`]", "", text)
