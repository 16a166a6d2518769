"""Messages of gpt-oss whose headers are unusual or malformed: calls are made, and no token is content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_output_parsers import REASONING_PARSERS, TOOL_PARSERS, ChainedParser
from llmstack_output_parsers.harmony import TOKENS
from llmstack_output_parsers.testing import FoldedMessage, check_output_parser

TOOLS = {"get": {"properties": {"city": {"type": "string"}}}}


def read(text: str) -> FoldedMessage:
    make = lambda: ChainedParser(REASONING_PARSERS["openai"](is_open=None), TOOL_PARSERS["openai"](TOOLS))  # noqa: E731
    return check_output_parser(make, text, range(0, 300, 5))


@pytest.mark.parametrize("channel", ["analysis", "commentary", "final"])
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>{} to=functions.get code<|message|>",
        "<|channel|>{} to=functions.get <|constrain|>json<|message|>",
        "<|start|>assistant to=functions.get<|channel|>{} json<|message|>",
        "<|channel|>{} to=functions.get <|constrain|>json",  # without `<|message|>`
    ],
)
def test_the_recipient_makes_a_message_a_call_whatever_its_channel(channel: str, header: str):
    found = read(f'<|channel|>analysis<|message|>hm<|end|>{header.format(channel)}{{"city": "X"}}<|call|>')
    assert (found.reasoning, found.content) == ("hm", "")
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [("get", {"city": "X"})]


def test_a_value_may_hold_every_token():
    for token in TOKENS:
        for channel in ("analysis", "commentary"):
            written = json.dumps({"city": f"a {token} b"})
            found = read(f"<|channel|>{channel} to=functions.get <|constrain|>json<|message|>{written}<|call|>")
            ((_, arguments),) = found.calls
            assert (json.loads(arguments), found.content) == ({"city": f"a {token} b"}, "")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel|>final Hello, you", "", "Hello, you"),
        ("<|channel|>final\n\nHello", "", "\n\nHello"),
        ("<|channel|>analysis Well, yes<|end|><|start|>assistant<|channel|>final<|message|>Yes", "Well, yes", "Yes"),
        ("<|start|>assistant Hello!", "", "Hello!"),
        ("<|channel|><|channel|>final<|message|>Yes<|return|>", "", "Yes"),
        ("<|channel|>final<|message|>Yes<|message|> no<|end|><|return|>", "", "Yes no"),
        ("Yes<|end|> no<|constrain|>", "", "Yes no"),
        ("<|channel|>final<|message|>Yes<|end|><|start|>assistant<|channel|>fin", "", "Yes"),
        ("<|channel|>commentary to=functions.get<|message|>no object<|call|>", "", "no object"),
    ],
)
def test_malformed_headers_leave_the_text_and_no_token(text: str, reasoning: str, content: str):
    found = read(text)
    assert (found.reasoning, found.content, found.calls) == (reasoning, content, [])


def test_without_tools_a_call_leaves_its_arguments_and_no_header():
    text = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city": "X"}<|call|>'
    found = check_output_parser(lambda: REASONING_PARSERS["openai"](is_open=None), text, range(0, 90, 4))
    assert (found.reasoning, found.content) == ("", '{"city": "X"}')


WORDS = [
    "assistant",
    "analysis",
    "final",
    " to=functions.get",
    "json",
    '{"city": "X"}',
    "Hi!",
    " ",
    "\n",
    "<",
    "commentary",
]


@given(parts=st.lists(st.sampled_from([*TOKENS, *TOKENS, *WORDS]), max_size=12))
@settings(max_examples=300, deadline=None)
def test_no_order_of_tokens_and_words_leaves_a_token(parts: list[str]):
    found = read("".join(parts))
    assert not any(token in found.content + found.reasoning for token in TOKENS)
    for _, arguments in found.calls:
        json.loads(arguments)
