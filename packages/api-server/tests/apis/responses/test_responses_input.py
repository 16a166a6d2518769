"""What may stand in `input`, and the conversation it makes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from llmstack_llm.media.parts import MediaPart
from llmstack_server.apis.responses.input_items import FindItem, adding, read_items, turns_after
from llmstack_types import InvalidRequestError


def read_input(value: Any, find_item: FindItem) -> list[dict[str, Any]]:
    return list(read_items(value, find_item))


def nothing(item_id: str) -> None:
    return None


def messages(value: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return messages_of(instructions, read_input(value, nothing))


def messages_of(instructions: str | None, items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    turns = turns_after(instructions)
    for _ in adding(items, turns):
        pass
    return turns.messages


def test_a_string_is_what_the_user_says():
    assert messages("Hello", "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]


def test_a_conversation_with_reasoning_calls_and_their_outputs():
    found = messages(
        [
            {"role": "developer", "content": "Rules."},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "Weather"}, {"type": "input_text", "text": "?"}],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sunny."}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No more."}]},
            {"role": "user", "content": "Thanks"},
        ]
    )
    assert found == [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": "Weather\n?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny", "name": "weather"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "assistant", "content": "No more."},
        {"role": "user", "content": "Thanks"},
    ]


def test_reasoning_without_its_text_is_known_by_its_summary_or_not_at_all():
    summary = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "In short."}]}
    assert messages([summary])[0]["reasoning_content"] == "In short."
    assert messages(
        [{"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"}, {"role": "user", "content": "a"}]
    ) == [{"role": "user", "content": "a"}]


def test_items_keep_their_ids_and_get_one_where_they_have_none():
    items = read_input(
        [{"role": "user", "content": "a", "id": "msg_mine"}, {"role": "user", "content": "b", "id": ""}], nothing
    )
    assert items[0]["id"] == "msg_mine"
    assert items[1]["id"].startswith("msg_")
    assert len(items[1]["id"]) > 20


def test_checked_items_are_read_again_as_they_are():
    items = read_input(
        [
            {"role": "assistant", "content": "a"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        ],
        nothing,
    )
    assert read_input(items, nothing) == items
    assert messages_of(None, items)[1]["content"] == "x"


def test_pictures_stand_between_the_texts_and_in_outputs_and_are_read_again():
    def text(value: str) -> dict[str, Any]:
        return {"type": "input_text", "text": value}

    items = read_input(
        [
            {"role": "user", "content": [text("a"), {"type": "input_image", "image_url": "x"}, text("b"), text("c")]},
            {"type": "function_call_output", "call_id": "c", "output": [
                {"type": "input_image", "image_url": "y", "detail": "low", "uuid": "u"},
                {"type": "input_image", "file_id": "f"}]},
        ],
        nothing,
    )  # fmt: skip
    assert read_input(items, nothing) == items
    assert messages_of(None, items) == [
        {"role": "user", "content": [
            {"type": "text", "text": "a"},
            MediaPart("image", "x", param="input[0].content[1]"),
            {"type": "text", "text": "b\nc"},
        ]},
        {"role": "tool", "tool_call_id": "c", "content": [
            MediaPart("image", "y", "u", "low", "input[1].output[0]"),
            MediaPart("image", "", param="input[1].output[1]", file_id="f"),
        ]},
    ]  # fmt: skip
    turns = turns_after(None)
    assert len(list(adding(items, turns, num_earlier=1))) == 2
    shown = [part.param for one in turns.messages for part in one["content"] if isinstance(part, MediaPart)]
    assert shown == ["previous_response_id", "input[0].output[0]", "input[0].output[1]"]


def test_a_reference_stands_for_the_item_it_names():
    item = read_input("Hello", nothing)[0]
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        assert read_input([reference], {item["id"]: item}.get) == [item]


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        (None, "input", "missing_required_parameter"),
        ([], "input", "empty_array"),
        (7, "input", "invalid_type"),
        (["a"], "input[0]", "invalid_type"),
        ([{"role": "user"}], "input[0].content", "missing_required_parameter"),
        ([{"role": "queen", "content": "a"}], "input[0].role", "invalid_value"),
        ([{"role": "user", "content": 7}], "input[0].content", "invalid_type"),
        ([{"role": "user", "content": [{"type": "input_image"}]}],
         "input[0].content[0].image_url", "missing_required_parameter"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "f", "image_url": "x"}]}],
         "input[0].content[0].file_id", "invalid_value"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": 7}]}],
         "input[0].content[0].file_id", "invalid_type"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "x"}]}],
         "input[0].content[0].detail", "invalid_value"),
        ([{"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}],
         "input[0].content[0].type", "unsupported_parameter"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content[0].type", "unsupported_parameter"),
        ([{"role": "user", "content": [{"type": "x"}]}], "input[0].content[0].type", "invalid_value"),
        ([{"role": "user", "content": [{"type": "text"}]}], "input[0].content[0].text", "missing_required_parameter"),
        ([{"type": "web_search_call", "id": "ws"}], "input[0].type", "unsupported_value"),
        ([{"type": ["x"]}], "input[0].type", "unsupported_value"),
        ([{"type": "function_call", "call_id": "c", "name": "f"}], "input[0].arguments", "missing_required_parameter"),
        ([{"type": "function_call_output", "call_id": "c"}], "input[0].output", "missing_required_parameter"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id", "missing_required_parameter"),
        ([{"type": "reasoning", "content": [{"type": "text"}]}], "input[0].content[0].type", "invalid_value"),
        ([{"type": "item_reference", "id": "msg_gone"}], "input[0].id", "not_found"),
        ([{}], "input[0].id", "missing_required_parameter"),
    ],
)  # fmt: skip
def test_an_item_at_fault_is_named(value: Any, param: str, code: str):
    with pytest.raises(InvalidRequestError) as caught:
        read_input(value, nothing)
    assert (caught.value.param, caught.value.code) == (param, code)
