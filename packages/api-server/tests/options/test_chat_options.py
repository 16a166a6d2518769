"""Flags about chats."""

from __future__ import annotations

import argparse

import pytest

from llmstack_output_parsers import (
    ThinkParser,
)
from llmstack_server.chat.parsers import choose_parsers
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.options.command_line import add_serve_arguments, settings_from
from llmstack_server.options.config import config_from
from llmstack_server.options.errors import ServeError


def parsed(*arguments: str) -> ChatOptions:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from(settings_from(parser.parse_args(arguments), {})).chat


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
        (
            ("--tool-call-parser", "nonsense"),
            "--tool-call-parser: there is no parser 'nonsense'; there are deepseek_v3, ",
        ),
        (("--reasoning-parser", "hermes"), "--reasoning-parser: there is no parser 'hermes'"),
        (("--tool-parser-plugin", "no_such_module:X"), "--tool-parser-plugin: 'no_such_module:X' cannot be loaded"),
        (
            ("--reasoning-parser-plugin", "./a.py"),
            "--reasoning-parser-plugin: './a.py' is a file; a plug-in is named as",
        ),
        (("--default-chat-template-kwargs", '{"a": [1]}'), "--default-chat-template-kwargs: Invalid type for"),
        (("--default-chat-template-kwargs", '{"tools": 1}'), "this name cannot be set"),
    ],
)
def test_what_cannot_work_ends_the_start(arguments: tuple[str, str], reason: str):
    with pytest.raises(ServeError, match=reason) as caught:
        parsed(*arguments)
    assert caught.value.exit_code == 2
