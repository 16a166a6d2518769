"""Choice of parsers for the model's text, by flags or by its templates."""

from __future__ import annotations

import logging
from typing import Final, Protocol

from llmstack_output_parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ReasoningParserFactory,
    UnknownParserError,
    reasoning_parser,
    tool_parser,
)
from llmstack_output_parsers.response_template import is_same_form, parsers_of_template
from llmstack_output_parsers.template_fields import ResponseTemplateError
from llmstack_server.options.chat_options import NO_PARSER, ChatOptions
from llmstack_server.options.errors import ServeError
from llmstack_server.state.server_state import ChatParsers

logger = logging.getLogger(__name__)

_BY_TEMPLATE: Final = "as the checkpoint's response template says"


class ChatTemplateSource(Protocol):
    """The text of a chat template; some models have a second one for chats with tools."""

    @property
    def source(self) -> str | None: ...
    @property
    def tool_source(self) -> str | None: ...
    @property
    def response_template(self) -> object: ...


def parsers_for(options: ChatOptions, template: ChatTemplateSource) -> ChatParsers:
    """The parsers for these templates; the one for chats with tools decides, if there is one."""
    source = template.source if template.tool_source is None else template.tool_source
    return choose_parsers(options, source, template.response_template)


def choose_parsers(options: ChatOptions, template: str | None, response_template: object = None) -> ChatParsers:
    """The parsers for a model with this chat template; None means a model without one.

    `response_template`: The checkpoint's own; None where it has none.

    Raises:
        ServeError: A parser of tool calls is required, and none is known; or a plug-in cannot be loaded.
    """
    chosen = _Choice(options, template or "")
    if response_template is not None:
        chosen.follow(response_template)
    if options.needs_tool_parser and chosen.tools is None:
        raise ServeError(
            "--enable-auto-tool-choice: no parser of tool calls is known for this model's chat template; "
            "name one by --tool-call-parser"
        )
    return chosen.parsers()


class _Choice:
    """Parsers by flags and by the chat template, and then by a response template."""

    def __init__(self, options: ChatOptions, template: str) -> None:
        tool_name, self._tool_reason = _named_or(options.tool_call_parser, _tool_parser_of(template))
        name, self._reasoning_reason = _named_or(options.reasoning_parser, _reasoning_parser_of(template))
        for known, plugin, ours in (
            (tool_name, options.tool_parser_plugin, TOOL_PARSERS),
            (name, options.reasoning_parser_plugin, REASONING_PARSERS),
        ):
            if plugin is not None and known in ours:
                logger.info("the parser %s is llmstack's own, so the plug-in %s is not loaded", known, plugin[-128:])
        plugin = options.reasoning_parser_plugin
        self._are_tools_given, self._is_reasoning_given = (
            given is not None for given in (options.tool_call_parser, options.reasoning_parser)
        )
        try:
            self.tools = None if tool_name is None else tool_parser(tool_name, options.tool_parser_plugin)
            self.reasoning = None if name is None else reasoning_parser(name, plugin)
        except UnknownParserError as error:  # of a plug-in: names were checked before
            raise ServeError(str(error)) from error

    def follow(self, response_template: object) -> None:
        """Takes what no flag has named from the response template, unless a parser of ours reads the same form."""
        try:
            found = parsers_of_template(response_template)
        except ResponseTemplateError as error:
            logger.warning("the response template of the checkpoint is not read: %s", error)
            return
        tools, reasoning = found.tools, found.reasoning
        has_own_tools = self._are_tools_given or (tools and self.tools and is_same_form(tools, self.tools))
        if tools is not None and not has_own_tools:
            self.tools, self._tool_reason = tools, _BY_TEMPLATE
        is_known = reasoning and self.reasoning and _tags(reasoning) == _tags(self.reasoning)
        if reasoning is not None and not (self._is_reasoning_given or is_known):
            self.reasoning, self._reasoning_reason = reasoning, _BY_TEMPLATE

    def parsers(self) -> ChatParsers:
        """The chosen parsers, with the reasons."""
        facts = (("tool_call_parser", self._tool_reason), ("reasoning_parser", self._reasoning_reason))
        return ChatParsers(self.tools, self.reasoning, facts)


def _tags(parser: ReasoningParserFactory) -> tuple[str, str]:
    return parser.start, parser.end


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
