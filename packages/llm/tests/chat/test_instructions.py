"""System and developer messages reach the model, whatever roles and places a template knows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm.chat.renderer import ChatRenderer
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.requests import ChatPrompt
from llmstack_llm.testing import byte_tokenizer
from llmstack_llm.text.tokenizer import Tokenizer

_LOOP = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
_USERS = "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
TEMPLATES = {
    "any role": _LOOP,
    "system": _USERS.replace("'user',", "'system', 'user',"),
    "system first": "{% if messages[0].role == 'system' %}[system: {{ messages[0].content }}]{% endif %}" + _USERS,
    "system first or refused": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
    "{% if messages[0].role == 'system' %}[system: {{ messages[0].content }}]{% endif %}" + _USERS,
    "last system": "{% set ns = namespace(text='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.text = m.content %}{% endfor %}[system: {{ ns.text }}]" + _USERS,
    "developer first": "{% if messages[0].role in ('developer', 'system') %}[{{ messages[0].role }}: "
    "{{ messages[0].content }}]{% endif %}" + _USERS,
    "developer": _USERS.replace("'user',", "'system', 'developer', 'user',"),
    "parts": "{% for m in messages %}{% if m.role == 'user' or loop.first %}[{{ m.role }}: {% for p in m['content'] %}"
    "{{ p['text'] }}{% endfor %}]{% endif %}{% endfor %}",
}  # fmt: skip


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def rendered(name: str, *messages: dict[str, Any]) -> str:
    renderer = ChatRenderer(ChatTemplate(TEMPLATES[name]), Tokenizer(byte_tokenizer(())))
    return renderer.render(ChatPrompt(list(messages))).text


@pytest.mark.parametrize(
    ("name", "role"),
    [("system", "system"), ("system first", "system"), ("parts", "system"), ("any role", "system"),
     ("developer first", "developer"), ("developer", "developer")],
)  # fmt: skip
def test_a_developer_message_has_the_role_that_the_template_knows(name: str, role: str):
    assert rendered(name, message("developer", "Rules."), message("user", "Hi")) == f"[{role}: Rules.][user: Hi]"


TURNS = (
    message("system", "A"),
    message("user", "b"),
    message("assistant", "c"),
    message("developer", "D"),
    message("user", "e"),
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("any role", "[system: A][user: b][assistant: c][system: D][user: e]"),
        ("system", "[system: A][user: b][assistant: c][system: D][user: e]"),
        ("developer", "[system: A][user: b][assistant: c][developer: D][user: e]"),
        ("system first", "[system: A\n\nD][user: b][assistant: c][user: e]"),
        ("system first or refused", "[system: A\n\nD][user: b][assistant: c][user: e]"),
        ("last system", "[system: A\n\nD][user: b][assistant: c][user: e]"),
        ("developer first", "[system: A\n\nD][user: b][assistant: c][user: e]"),
        ("parts", "[system: A\n\nD][user: b][user: e]"),
    ],
)
def test_later_instructions_join_the_first_where_the_template_does_not_show_them(name: str, expected: str):
    assert rendered(name, *TURNS) == expected


def test_later_instructions_come_first_where_there_is_no_other():
    turns = [message("user", "b"), message("assistant", "c"), message("system", "D"), message("user", "e")]
    assert rendered("system first or refused", *turns) == "[system: D][user: b][assistant: c][user: e]"


def test_content_in_parts_is_joined_too():
    turns = [message("system", "A"), message("user", "b"), message("system", [{"type": "text", "text": "D"}])]
    assert rendered("parts", *turns) == "[system: A\n\nD][user: b]"


@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.lists(st.sampled_from(["system", "developer", "user"]), min_size=1, max_size=7),
)
def test_every_instruction_reaches_the_model_in_order(name: str, roles: list[str]):
    shown = rendered(name, *(message(role, f"text {index}.") for index, role in enumerate([*roles, "user"])))
    kinds = (
        [index for index, role in enumerate(roles) if role != "user"],
        [index for index, role in enumerate([*roles, "user"]) if role == "user"],
    )
    for indexes in kinds:
        places = [shown.find(f"text {index}.") for index in indexes]
        assert -1 not in places, shown
        assert places == sorted(places)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_asked_whether_it_shows_a_system_message(name: str) -> None:
    renderer = ChatRenderer(ChatTemplate(TEMPLATES[name]), Tokenizer(byte_tokenizer(())))
    assert renderer.has_system_prompt is True


@pytest.mark.parametrize("source", [_USERS, "{{ raise_exception('no') }}", "{{ messages[-1].content }}"])
def test_a_template_that_shows_none_says_so(source: str) -> None:
    assert ChatRenderer(ChatTemplate(source), Tokenizer(byte_tokenizer(()))).has_system_prompt is False
