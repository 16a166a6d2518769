"""Flags about chats."""

from __future__ import annotations

import argparse
from pathlib import Path

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


def test_a_file_of_python_is_loaded_at_the_start_and_not_before(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from llmstack_output_parsers import ThinkParser\n\n"
        "class Mine(ThinkParser):\n    pass\n\nif True:\n    raise OSError(1)\n"
    )
    options = parsed("--reasoning-parser-plugin", str(path))
    assert options.reasoning_parser == "mine"
    with pytest.raises(ServeError, match=r"mine.py' cannot be loaded: OSError: 1"):
        choose_parsers(options, None)
    path.write_text(path.read_text().replace("raise OSError(1)", "pass"))
    assert choose_parsers(options, None).reasoning.__name__ == "Mine"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ("--tool-call-parser", "nonsense"),
            "--tool-call-parser: there is no parser 'nonsense'; ",
        ),
        (("--reasoning-parser", "hermes"), "--reasoning-parser: there is no parser 'hermes'"),
        (("--tool-parser-plugin", "no_such_module:X"), "--tool-parser-plugin: 'no_such_module:X': there is no module"),
        (("--tool-call-parser-plugin", "a.py"), "--tool-parser-plugin: 'a.py' cannot be read: No such file"),
        (
            ("--reasoning-parser-plugin", "./a.py"),
            "--reasoning-parser-plugin: 'a.py' cannot be read",
        ),
        (("--default-chat-template-kwargs", '{"a": [1]}'), "--default-chat-template-kwargs: Invalid type for"),
        (("--default-chat-template-kwargs", '{"tools": 1}'), "this name cannot be set"),
    ],
)
def test_what_cannot_work_ends_the_start(arguments: tuple[str, str], reason: str):
    with pytest.raises(ServeError, match=reason) as caught:
        parsed(*arguments)
    assert caught.value.exit_code == 2
