"""What may stand in `messages` and around them, and the conversation it makes."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_llm.media.parts import MediaPart
from llmstack_server.apis.anthropic.input import continues_last_message, read_messages
from llmstack_server.apis.anthropic.tools import chat_tool_choice, chat_tools, structured_outputs, template_kwargs
from llmstack_types import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def image(url: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": url}}


def test_a_conversation_with_thoughts_calls_and_their_results():
    found = read_messages(
        [text("Be brief."), text("Be kind.")],
        [
            user(text("Weather"), text("in Rome?")),
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("I look."),
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            user({"type": "tool_result", "tool_use_id": "t1", "content": [text("sunny")]}, text("And now?")),
        ],
    )
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    assert found == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Weather\nin Rome?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "sunny", "name": "weather"},
        {"role": "user", "content": "And now?"},
    ]


def test_turns_of_one_role_are_one():
    found = read_messages("Rules.", [{"role": "system", "content": "More."}, user(text("a")), user(text("b"))])
    assert found == [{"role": "system", "content": "Rules.\n\nMore."}, {"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("last", "is_continued"),
    [
        ({"role": "assistant", "content": "The answer is ("}, True),
        ({"role": "assistant", "content": []}, False),
        ({"role": "user", "content": "?"}, False),
        ({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}, False),
    ],
)
def test_an_assistants_text_at_the_end_is_continued(last: dict[str, Any], is_continued: bool):
    assert continues_last_message(read_messages(None, [user(text("a")), last])) == is_continued


@pytest.mark.parametrize("messages", [[user()], [user(text("a")), user()], [{"role": "assistant", "content": []}]])
def test_a_turn_of_the_user_says_something(messages: list[dict[str, Any]]):
    with pytest.raises(InvalidRequestError) as caught:
        read_messages(None, messages)
    assert (caught.value.param, caught.value.code) == (f"messages[{len(messages) - 1}].content", "empty_array")


def test_a_result_may_be_empty_or_a_string():
    results = [
        {"type": "tool_result", "tool_use_id": "t1", **rest} for rest in ({}, {"content": "x", "is_error": True})
    ]
    assert [message["content"] for message in read_messages(None, [user(*results)])] == ["", "x"]


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, "citations": {"enabled": False}}


PLAIN = document(type="text", media_type="text/plain", data="The sky is blue.")
RESULT = {"type": "search_result", "title": "Sky", "source": "https://a.example", "content": [text("Blue.")]}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (PLAIN, "The sky is blue."),
        (PLAIN | {"title": "Sky", "context": None}, "Sky\nThe sky is blue."),
        (PLAIN | {"title": "Sky", "context": "From a book."}, "Sky\nFrom a book.\nThe sky is blue."),
        (document(type="content", content="a"), "a"),
        (document(type="content", content=[text("a"), text("b")]), "a\nb"),
        (RESULT, "Sky\nhttps://a.example\nBlue."),
    ],
)
def test_a_document_in_plain_text_is_text(block: dict[str, Any], expected: str):
    assert read_messages(None, [user(block, text("?"))]) == [{"role": "user", "content": f"{expected}\n?"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block, text("!")]}
    assert read_messages(None, [user(result)])[0]["content"] == f"{expected}\n!"


def test_pictures_stand_between_the_texts_and_in_results():
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("r"), image("b")]}
    base64 = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    file = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    blocks = [text("a"), text("b"), image("x"), text("c"), base64, file]
    assert read_messages(None, [user(*blocks), user(text("d")), user(result)]) == [
        {"role": "user", "content": [
            {"type": "text", "text": "a\nb"},
            MediaPart("image", "x", param="messages[0].content[2]"),
            {"type": "text", "text": "c"},
            MediaPart("image", "data:image/png;base64,AA==", param="messages[0].content[4]"),
            MediaPart("image", "", param="messages[0].content[5]", file_id="f"),
            {"type": "text", "text": "d"},
        ]},
        {"role": "tool", "tool_call_id": "t", "content": [
            {"type": "text", "text": "r"}, MediaPart("image", "b", param="messages[2].content[0].content[1]"),
        ]},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        (None, "messages", "missing_required_parameter"),
        ([], "messages", "empty_array"),
        ([{"content": "a"}], "messages[0].role", "missing_required_parameter"),
        ([{"role": "tool", "content": "a"}], "messages[0].role", "invalid_value"),
        ([{"role": "user"}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "user", "content": 7}], "messages[0].content", "invalid_type"),
        ([user("a")], "messages[0].content[0]", "invalid_type"),
        ([user({})], "messages[0].content[0].type", "missing_required_parameter"),
        ([user({"type": "container_upload"})], "messages[0].content[0].type", "unsupported_parameter"),
        ([{"role": "assistant", "content": [image("a")]}], "messages[0].content[0].type", "unsupported_parameter"),
        ([user({"type": "image"})], "messages[0].content[0].source", "missing_required_parameter"),
        ([user({"type": "image", "source": "a"})], "messages[0].content[0].source", "invalid_type"),
        ([user({"type": "image", "source": {}})], "messages[0].content[0].source.type", "missing_required_parameter"),
        ([user({"type": "image", "source": {"type": "gone", "file_id": "f"}})],
         "messages[0].content[0].source.type", "unsupported_parameter"),
        ([user({"type": "image", "source": {"type": "url", "url": 7}})],
         "messages[0].content[0].source.url", "invalid_type"),
        ([user({"type": "image", "source": {"type": "url", "url": ""}})],
         "messages[0].content[0].source.url", "invalid_value"),
        ([user({"type": "image", "source": {"type": "base64", "media_type": "a;b,", "data": ""}})],
         "messages[0].content[0].source.media_type", "invalid_value"),
        ([user(document(type="base64", media_type="application/pdf", data=""))],
         "messages[0].content[0].source.type", "unsupported_parameter"),
        ([user(document(type="text"))], "messages[0].content[0].source.data", "missing_required_parameter"),
        ([user({"type": "document"})], "messages[0].content[0].source", "missing_required_parameter"),
        ([user({"type": "document", "source": "a"})], "messages[0].content[0].source", "invalid_type"),
        ([user(PLAIN | {"title": 5})], "messages[0].content[0].title", "invalid_type"),
        ([user(document(type="content", content=[{"type": "image"}]))],
         "messages[0].content[0].source.content[0].type", "unsupported_parameter"),
        ([user(RESULT | {"content": None})], "messages[0].content[0].content", "missing_required_parameter"),
        ([{"role": "assistant", "content": [PLAIN]}], "messages[0].content[0].type", "invalid_value"),
        ([user(text("a"), {"type": "tool_use"})], "messages[0].content[1].type", "invalid_value"),
        ([user({"type": "text"})], "messages[0].content[0].text", "missing_required_parameter"),
        ([user({"type": "tool_result"})], "messages[0].content[0].tool_use_id", "missing_required_parameter"),
        ([user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]})],
         "messages[0].content[0].content[0].source", "missing_required_parameter"),
        ([{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": "x"}]}],
         "messages[0].content[0].input", "invalid_type"),
    ],
)  # fmt: skip
def test_a_block_at_fault_is_named(messages: Any, param: str, code: str):
    with pytest.raises(InvalidRequestError) as caught:
        read_messages(None, messages)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_a_system_prompt_is_text():
    with pytest.raises(InvalidRequestError) as caught:
        read_messages(7, [user(text("a"))])
    assert caught.value.param == "system"


def test_tools_become_functions():
    tool = {"name": "weather", "description": "Tells.", "input_schema": SCHEMA, "cache_control": {}, "type": "custom"}
    function = {"name": "weather", "description": "Tells.", "parameters": SCHEMA}
    assert chat_tools([tool]) == [{"type": "function", "function": function}]
    assert chat_tools(None) == []


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (None, True)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "none"}, ("none", True)),
        ({"type": "tool", "name": "f"}, ({"type": "function", "function": {"name": "f"}}, True)),
    ],
)
def test_the_choice_among_tools_has_openais_words(choice: Any, expected: Any):
    assert chat_tool_choice(choice) == expected


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, {}),
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {}),
    ],
)
def test_thinking_is_the_templates_business(thinking: Any, expected: dict[str, Any]):
    assert template_kwargs(thinking) == expected


def test_an_output_format_is_a_constraint():
    assert structured_outputs(None) is None
    constraint = structured_outputs({"type": "json_schema", "schema": SCHEMA})
    assert constraint is not None
    assert constraint.json == SCHEMA


@pytest.mark.parametrize(
    ("read", "param", "code"),
    [
        (lambda: chat_tools([{"type": "web_search_20250305", "name": "web_search"}]), "tools[0].type",
         "unsupported_value"),
        (lambda: chat_tools([{"name": "f"}]), "tools[0].input_schema", "missing_required_parameter"),
        (lambda: chat_tools([{"input_schema": {}}]), "tools[0].name", "missing_required_parameter"),
        (lambda: chat_tool_choice({"type": "required"}), "tool_choice.type", "invalid_value"),
        (lambda: chat_tool_choice({"type": "tool"}), "tool_choice.name", "missing_required_parameter"),
        (lambda: template_kwargs({"type": "maybe"}), "thinking.type", "invalid_value"),
        (lambda: template_kwargs({"type": "enabled", "budget_tokens": "x"}), "thinking.budget_tokens",
         "invalid_type"),
        (lambda: structured_outputs({"type": "grammar"}), "output_config.format.type", "invalid_value"),
        (lambda: structured_outputs({"type": "json_schema"}), "output_config.format.schema", "invalid_type"),
    ],
)  # fmt: skip
def test_a_field_around_the_messages_at_fault_is_named(read: Any, param: str, code: str):
    with pytest.raises(InvalidRequestError) as caught:
        read()
    assert (caught.value.param, caught.value.code) == (param, code)
