"""Arguments of earlier calls, whatever a model has written, reach the template as an object."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm.chat.renderer import ChatRenderer
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.chat.tool_calls import INVALID_JSON, argument_object
from llmstack_llm.requests import ChatPrompt
from llmstack_llm.testing import byte_tokenizer
from llmstack_llm.text.tokenizer import Tokenizer

CALLS = """{% for m in messages %}{% for c in m.tool_calls or [] %}{% for key, value in c.function.arguments.items() %}
{{- key }}={{ value | tojson }};{% endfor %}{% endfor %}{{ m.content }}{% endfor %}"""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def rendered(arguments: str) -> str:
    function = {"name": "now", "arguments": arguments}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "!"},
    ]
    return ChatRenderer(ChatTemplate(CALLS), Tokenizer(byte_tokenizer(()))).render(ChatPrompt(messages)).text


@pytest.mark.parametrize(
    "arguments",
    [
        "{", '{"a": "b', "[1]", "7", "null", "not JSON", '{"a": 1}}', '{"a":' * 64 + "{}" + "}" * 64,
        '{"a":' * 9999 + "{}" + "}" * 9999, '{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}",
    ],
)  # fmt: skip
def test_a_text_that_is_no_object_is_shown_to_the_model_as_it_wrote_it(arguments: str):
    assert argument_object(arguments) == {INVALID_JSON: arguments}
    assert rendered(arguments) == f"?{INVALID_JSON}={json.dumps(arguments)};!"


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.data())
def test_a_call_cut_anywhere_is_read_whole_or_as_text(found: dict[str, Any], data: st.DataObject):
    text = json.dumps(found, ensure_ascii=data.draw(st.booleans()))
    cut = text[: data.draw(st.integers(0, len(text)))]
    expected = found if cut == text else {INVALID_JSON: cut} if cut else {}
    assert argument_object(cut) == expected


@given(st.text())
def test_no_text_of_arguments_is_refused(arguments: str):
    rendered(arguments).encode()
