"""Choice of parsers for the model's text, by flags or by its chat template."""

from __future__ import annotations

from typing import Protocol

from llmstack_output_parsers import UnknownParserError, reasoning_parser, tool_parser
from llmstack_server.options.chat_options import NO_PARSER, ChatOptions
from llmstack_server.options.errors import ServeError
from llmstack_server.state.server_state import ChatParsers


class ChatTemplateSource(Protocol):
    """The text of a chat template; some models have a second one for chats with tools."""

    @property
    def source(self) -> str | None: ...
    @property
    def tool_source(self) -> str | None: ...


def parsers_for(options: ChatOptions, template: ChatTemplateSource) -> ChatParsers:
    """The parsers for these templates; the one for chats with tools decides, if there is one."""
    return choose_parsers(options, template.source if template.tool_source is None else template.tool_source)


def choose_parsers(options: ChatOptions, template: str | None) -> ChatParsers:
    """The parsers for a model with this chat template; None means a model without one.

    Raises:
        ServeError: A parser of tool calls is required, and none is known; or a plug-in cannot be loaded.
    """
    tool_name, tool_reason = _named_or(options.tool_call_parser, _tool_parser_of(template or ""))
    reasoning_name, reasoning_reason = _named_or(options.reasoning_parser, _reasoning_parser_of(template or ""))
    if options.needs_tool_parser and tool_name is None:
        raise ServeError(
            "--enable-auto-tool-choice: no parser of tool calls is known for this model's chat template; "
            "name one by --tool-call-parser"
        )
    try:
        tools = None if tool_name is None else tool_parser(tool_name, options.tool_parser_plugin)
        plugin = options.reasoning_parser_plugin
        reasoning = None if reasoning_name is None else reasoning_parser(reasoning_name, plugin)
    except UnknownParserError as error:  # of a plug-in: names were checked before
        raise ServeError(str(error)) from error
    return ChatParsers(tools, reasoning, (("tool_call_parser", tool_reason), ("reasoning_parser", reasoning_reason)))


def _named_or(name: str | None, found: str | None) -> tuple[str | None, str]:
    """The name of a parser, and the reason for the choice."""
    if name == NO_PARSER:
        return None, "none (by flag)"
    if name is not None:
        return name, f"{name} (by flag)"
    return found, "none (the chat template shows no known form)" if found is None else f"{found} (by the chat template)"


# Texts that only the template of one format has, each with its parser; the first that occurs decides.
_TOOL_MARKS = (
    ("<arg_key>", "glm45"),
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<dots_function_call>", "dots"),
    ("<|tool_call_argument_begin|>", "kimi_k2"),
    ("<steptml:invoke", "step3"),
    ("<|tool_call>call:", "gemma4"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|channel|>commentary", "openai"),
)
_REASONING_MARKS = (
    ("<seed:think>", "seed_oss"),
    ("<|channel|>analysis", "openai"),
    ("[/THINK]", "mistral"),
)


def _tool_parser_of(template: str) -> str | None:
    """The parser for the form of calls in the template."""
    for mark, name in _TOOL_MARKS:
        if mark in template:
            return name
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_start|>" in template or "[func_name1(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or '{"name": function name, "parameters":' in template:
        return "llama3_json"
    return None


def _reasoning_parser_of(template: str) -> str | None:
    for mark, name in _REASONING_MARKS:
        if mark in template:
            return name
    return "think" if "</think>" in template else None
