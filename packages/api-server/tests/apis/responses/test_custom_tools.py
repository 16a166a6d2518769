"""The text of a custom tool's call, however its arguments are written and wherever they end."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.apis.responses.custom_tools import input_of


@given(st.text(), st.booleans(), st.data())
def test_arguments_cut_anywhere_give_the_beginning_of_the_text(text: str, ascii_only: bool, data: st.DataObject):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert input_of(arguments) == text
    cut = input_of(arguments[: data.draw(st.integers(0, len(arguments) - 1))])
    assert text.startswith(cut.removesuffix("\ufffd"))  # half a pair, in escapes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ""), ("{", ""), ('{ "inp', ""), ('{"input": ', ""), ('{"input": "a', "a"), ('{"input": "a\\u00', "a"),
        ('{"code": "a"}', '{"code": "a"}'), ('{"input": 7}', '{"input": 7}'), ("[1]", "[1]"), ("print()", "print()"),
    ],
)  # fmt: skip
def test_what_has_no_such_text_is_shown_as_it_is(arguments: str, expected: str):
    assert input_of(arguments) == expected
