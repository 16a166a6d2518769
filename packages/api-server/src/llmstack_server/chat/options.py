"""Flags of `llmstack serve` about chats, and what they configure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmstack_server.errors import ServeError
from llmstack_server.flag_types import json_object

NO_PARSER = "none"
Add = Callable[..., argparse.Action]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How chats are rendered and their answers read.

    Attributes:
        tool_call_parser: Name of the parser of tool calls; None asks the chat template, `none` is for no parser.
        reasoning_parser: The same for reasoning.
        needs_tool_parser: Whether the server must not start without a parser of tool calls.
        excludes_unused_tools: Whether the template sees no tools where `tool_choice` is `none`.
        template_kwargs: For every template; those of a request win.
        trusts_request_template: Whether requests may bring a template of their own.
    """

    tool_call_parser: str | None = None
    tool_parser_plugin: str | None = None
    reasoning_parser: str | None = None
    reasoning_parser_plugin: str | None = None
    needs_tool_parser: bool = False
    excludes_unused_tools: bool = False
    response_role: str = "assistant"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trusts_request_template: bool = False


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of this module."""
    add = parser.add_argument_group("chat").add_argument
    _add_template_arguments(add)
    _add_parser_arguments(add)


def _add_template_arguments(add: Add) -> None:
    add(
        "--chat-template-content-format",
        choices=("auto", "string", "openai"),
        default="auto",
        help="whether templates get a message's content as one string or in parts; 'auto' asks them (default: auto)",
    )
    add(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help='arguments of every chat template, such as {"enable_thinking": false}',
    )
    add(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring a chat template of their own",
    )
    add("--response-role", default="assistant", metavar="ROLE", help="role of answers (default: assistant)")


def _add_parser_arguments(add: Add) -> None:
    add(
        "--tool-call-parser",
        metavar="NAME",
        help="how the model writes tool calls: hermes, llama3_json, mistral, pythonic, qwen3, qwen3_coder, one of an "
        "installed package, or none (default: what the chat template looks like)",
    )
    add("--tool-parser-plugin", metavar="MODULE:CLASS", help="a parser of tool calls, which --tool-call-parser names")
    add(
        "--enable-auto-tool-choice",
        action="store_true",
        help="refuse to start where no parser of tool calls is known; with one, tools always work",
    )
    add(
        "--exclude-tools-when-tool-choice-none",
        action="store_true",
        help="do not show tools to the model where 'tool_choice' is 'none'",
    )
    add(
        "--reasoning-parser",
        metavar="NAME",
        help="how the model writes its reasoning: think, qwen3, deepseek_r1, mistral, one of an installed package, or "
        "none (default: what the chat template looks like)",
    )
    add(
        "--reasoning-parser-plugin",
        metavar="MODULE:CLASS",
        help="a parser of reasoning, which --reasoning-parser names",
    )


def chat_options(namespace: argparse.Namespace) -> ChatOptions:
    """The options of a parsed command line.

    Raises:
        ServeError: There is no such parser, or no template may get such arguments.
    """
    options = ChatOptions(
        tool_call_parser=_name(namespace.tool_call_parser, namespace.tool_parser_plugin),
        tool_parser_plugin=namespace.tool_parser_plugin,
        reasoning_parser=_name(namespace.reasoning_parser, namespace.reasoning_parser_plugin),
        reasoning_parser_plugin=namespace.reasoning_parser_plugin,
        needs_tool_parser=namespace.enable_auto_tool_choice,
        excludes_unused_tools=namespace.exclude_tools_when_tool_choice_none,
        response_role=namespace.response_role,
        template_kwargs=_template_kwargs(namespace.default_chat_template_kwargs),
        trusts_request_template=namespace.trust_request_chat_template,
    )
    _check_names(options)
    return options


def _name(name: str | None, plugin: str | None) -> str | None:
    """A plug-in without a name goes by its class's."""
    return plugin.rpartition(":")[2] if name in (None, "") and plugin is not None else name or None


def _template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    if not kwargs:
        return {}
    from llmstack_llm.chat_messages import check_template_kwargs
    from llmstack_types import InvalidRequestError

    try:
        return check_template_kwargs(kwargs)
    except InvalidRequestError as error:
        raise ServeError(f"--default-chat-template-kwargs: {error.message}", exit_code=2) from None


def _check_names(options: ChatOptions) -> None:
    from llmstack_output_parsers import UnknownParserError, reasoning_parser, tool_parser

    for flag, name, plugin, find in (
        ("--tool-call-parser", options.tool_call_parser, options.tool_parser_plugin, tool_parser),
        ("--reasoning-parser", options.reasoning_parser, options.reasoning_parser_plugin, reasoning_parser),
    ):
        try:
            if name not in (None, NO_PARSER):
                find(name, plugin)
        except UnknownParserError as error:
            raise ServeError(f"{flag}: {error}", exit_code=2) from None
