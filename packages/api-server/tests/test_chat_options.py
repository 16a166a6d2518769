"""Flags about chats, and which parsers follow from them and from the chat template."""

from __future__ import annotations

import argparse

import pytest

from llmstack_output_parsers import (
    DeepSeekR1Parser,
    HermesToolParser,
    Llama3JsonToolParser,
    MistralReasoningParser,
    MistralToolParser,
    PythonicToolParser,
    Qwen3CoderToolParser,
    ThinkParser,
)
from llmstack_server.chat.options import ChatOptions, add_chat_arguments, chat_options
from llmstack_server.chat.parsers import choose_parsers
from llmstack_server.chat.reasoning import ReasoningCounter
from llmstack_server.errors import ServeError


def parsed(*arguments: str) -> ChatOptions:
    parser = argparse.ArgumentParser()
    add_chat_arguments(parser)
    return chat_options(parser.parse_args(arguments))


def test_without_flags_everything_is_left_to_the_model():
    assert parsed() == ChatOptions()


def test_flags_reach_the_options():
    options = parsed(
        "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--enable-auto-tool-choice",
        "--exclude-tools-when-tool-choice-none", "--response-role", "bot", "--trust-request-chat-template",
        "--default-chat-template-kwargs", '{"enable_thinking": false}',
    )  # fmt: skip
    assert options == ChatOptions(
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        needs_tool_parser=True,
        excludes_unused_tools=True,
        response_role="bot",
        template_kwargs={"enable_thinking": False},
        trusts_request_template=True,
    )


def test_a_plugin_goes_by_its_class_where_nothing_names_it():
    plugin = "llmstack_output_parsers:ThinkParser"
    assert parsed("--reasoning-parser-plugin", plugin).reasoning_parser == "ThinkParser"
    options = parsed("--reasoning-parser-plugin", plugin, "--reasoning-parser", "mine")
    assert choose_parsers(options, None).reasoning is ThinkParser


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--tool-call-parser", "nonsense"), "--tool-call-parser: there is no parser 'nonsense'; there are hermes, "),
        (("--reasoning-parser", "hermes"), "--reasoning-parser: there is no parser 'hermes'"),
        (("--tool-parser-plugin", "no_such_module:X"), "--tool-call-parser: 'no_such_module:X' cannot be loaded"),
        (("--default-chat-template-kwargs", '{"a": [1]}'), "--default-chat-template-kwargs: Invalid type for"),
        (("--default-chat-template-kwargs", '{"tools": 1}'), "this name cannot be set"),
    ],
)
def test_what_cannot_work_ends_the_start(arguments: tuple[str, str], reason: str):
    with pytest.raises(ServeError, match=reason) as caught:
        parsed(*arguments)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        (None, None, None),
        ("{{ messages }}", None, None),
        ("<tool_call>{{ x }}</tool_call>", HermesToolParser, None),
        ("<tool_call><think></think>", HermesToolParser, ThinkParser),
        ("<tool_call>\\n<function=example>", Qwen3CoderToolParser, None),
        ("[TOOL_CALLS] {{ x }}", MistralToolParser, None),
        ("[TOOL_CALLS][THINK]x[/THINK]", MistralToolParser, MistralReasoningParser),
        ("<|python_tag|>", Llama3JsonToolParser, None),
        ('Respond in the format {"name": function name, "parameters": dictionary}', Llama3JsonToolParser, None),
        ("<|python_start|>", PythonicToolParser, None),
        ("[func_name1(params_name1=params_value1)]", PythonicToolParser, None),
    ],
)
def test_the_chat_template_tells_the_parsers(template: str | None, tool: type | None, reasoning: type | None):
    parsers = choose_parsers(ChatOptions(), template)
    assert (parsers.tool, parsers.reasoning) == (tool, reasoning)


def test_flags_win_over_the_template():
    options = ChatOptions(tool_call_parser="mistral", reasoning_parser="deepseek_r1")
    parsers = choose_parsers(options, "<tool_call></think>")
    assert (parsers.tool, parsers.reasoning) == (MistralToolParser, DeepSeekR1Parser)
    assert dict(parsers.facts) == {
        "tool_call_parser": "mistral (by flag)",
        "reasoning_parser": "deepseek_r1 (by flag)",
    }
    off = choose_parsers(ChatOptions(tool_call_parser="none", reasoning_parser="none"), "<tool_call></think>")
    assert (off.tool, off.reasoning) == (None, None)


def test_a_server_that_must_have_a_parser_does_not_start_without():
    assert choose_parsers(ChatOptions(needs_tool_parser=True), "<tool_call>").tool is HermesToolParser
    with pytest.raises(ServeError, match=r"--enable-auto-tool-choice: .* name one by --tool-call-parser"):
        choose_parsers(ChatOptions(needs_tool_parser=True), "{{ x }}")


@pytest.mark.parametrize(
    ("is_open", "token_ids", "num_reasoning"),
    [
        (False, [1, 2, 3], 0),
        (False, [8, 1, 2, 9, 3], 2),
        (True, [1, 2, 9, 3, 8, 4], 2),
        (True, [8, 1, 2], 2),
        (True, [9, 1], 0),
    ],
)
def test_tokens_of_reasoning_are_those_between_its_tags(is_open: bool, token_ids: list[int], num_reasoning: int):
    assert ReasoningCounter(8, 9, is_open=is_open).count(token_ids) == num_reasoning
    counter = ReasoningCounter(8, 9, is_open=is_open)
    assert sum(counter.count([token_id]) for token_id in token_ids) == num_reasoning
