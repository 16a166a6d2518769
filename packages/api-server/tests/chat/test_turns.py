"""Turns become messages that templates can read at once."""

from __future__ import annotations

import pytest

from llmstack_llm import request_errors
from llmstack_llm.media.parts import MediaPart
from llmstack_server.chat.turns import TurnBuilder, content_of, in_words_of_api


def test_what_an_assistant_thinks_says_and_calls_is_one_message():
    turns = TurnBuilder()
    turns.say("user", "hi")
    turns.think("hm")
    turns.say("assistant", "look")
    turns.call("c1", "find", "{}")
    turns.call("c2", "find", '{"a":1}')
    assert turns.messages[1:] == [
        {
            "role": "assistant",
            "content": "look",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "find", "arguments": '{"a":1}'}},
            ],
        }
    ]


def test_thoughts_after_words_or_calls_begin_another_message():
    turns = TurnBuilder()
    turns.say("assistant", "one")
    turns.think("hm")
    turns.think("hmm")
    turns.call("c1", "find", "{}")
    turns.think("again")
    assert [message.get("reasoning_content") for message in turns.messages] == [None, "hm\nhmm", "again"]


def test_system_messages_at_the_beginning_are_one_and_developers_speak_as_the_system():
    turns = TurnBuilder()
    for role in ("system", "developer", "user", "developer"):
        turns.say(role, role)
    assert turns.messages == [
        {"role": "system", "content": "system\n\ndeveloper"},
        {"role": "user", "content": "user"},
        {"role": "system", "content": "developer"},
    ]


@pytest.mark.parametrize(("joins", "texts"), [(True, ["a\nb"]), (False, ["a", "b"])])
def test_consecutive_texts_of_one_role_are_joined_where_the_api_says_so(joins: bool, texts: list[str]):
    for role in ("user", "assistant"):
        turns = TurnBuilder(joins_turns=joins)
        turns.say(role, "a")
        turns.say(role, "b")
        assert [message["content"] for message in turns.messages] == texts


def test_the_answer_of_a_call_has_the_name_of_its_function_where_that_is_known():
    turns = TurnBuilder()
    turns.call("c1", "find", "{}")
    turns.answer("c1", "found")
    turns.answer("c9", "what?")
    assert turns.messages[1:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "found", "name": "find"},
        {"role": "tool", "tool_call_id": "c9", "content": "what?"},
    ]


@pytest.mark.parametrize(
    ("param", "name"),
    [
        ("messages[3].role", "input"),
        ("tools[1].function.name", "tools[1].name"),
        ("tools[1].function.parameters", "tools[1].schema"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("temperature", "temperature"),
    ],
)
def test_errors_about_what_was_built_name_what_the_user_has_sent(param: str, name: str):
    error = request_errors.invalid_value(param, "no")
    shown = in_words_of_api(error, "input", {".function.parameters": ".schema", ".function": ""})
    assert (shown.param, shown.message, shown.code) == (name, f"Invalid '{name}': no.", error.code)


@pytest.mark.parametrize("param", ["input[2].content[0]", "messages[0].content[1].content[0]"])
def test_errors_about_media_keep_the_name_that_the_user_knows(param: str):
    messages = [{"role": "user", "content": [MediaPart("image", "x", param=param)]}]
    for name in (param, f"{param}.type"):
        error = request_errors.invalid_value(name, "no")
        assert in_words_of_api(error, "input", {}, messages) is error
    assert in_words_of_api(request_errors.invalid_value("messages[0]", "no"), "input", {}, messages).param == "input"


def test_texts_around_media_are_joined_as_texts_are():
    turns = TurnBuilder(joins_turns=True)
    media = MediaPart("image", "x")
    turns.say("user", "a")
    turns.say("user", content_of(["b", "c", media, "d"]))
    turns.say("user", "e")
    turns.say("user", content_of([media]))
    texts = [{"type": "text", "text": text} for text in ("a\nb\nc", "d\ne")]
    assert turns.messages == [{"role": "user", "content": [texts[0], media, texts[1], media]}]
    assert content_of(["a", "b"]) == "a\nb"
    assert content_of([]) == ""
