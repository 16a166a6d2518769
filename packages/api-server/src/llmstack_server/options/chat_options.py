"""Options of chats: arguments of templates, and parsers of what the model writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmstack_llm.options.option import OptionGroup
from llmstack_llm.options.problem import Problem
from llmstack_types.options import option, option_group

NO_PARSER = "none"


def check_template_arguments(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    """Arguments that any chat template may have."""
    if not kwargs:
        return kwargs
    from llmstack_llm.chat.messages import check_template_kwargs
    from llmstack_types import InvalidRequestError

    try:
        return check_template_kwargs(dict(kwargs))
    except InvalidRequestError as error:
        raise ValueError(error.message) from None


@option_group
class ChatOptions(OptionGroup):
    """How chats are rendered and their answers parsed."""

    title = "Chat"

    template_kwargs: Mapping[str, object] = option(
        {},
        flag="--default-chat-template-kwargs",
        check=check_template_arguments,
        help="arguments of every chat template, unless a request has them",
        example='{"enable_thinking": false}',
    )
    trusts_request_template: bool = option(
        False, flag="--trust-request-chat-template", help="accept chat templates in requests"
    )
    response_role: str = option("assistant", metavar="ROLE", help="role of the answers")
    tool_call_parser: str | None = option(
        None,
        metavar="NAME",
        help="format of the model's tool calls, such as hermes, glm45 or openai, one of an installed package, or "
        "none (default: detected from the chat template)",
    )
    tool_parser_plugin: str | None = option(
        None,
        also=("--tool-call-parser-plugin",),
        metavar="PLUGIN",
        help="custom parser of tool calls, which --tool-call-parser names: module:Class, or a file of Python",
        example="parsers.py",
    )
    needs_tool_parser: bool = option(
        False,
        flag="--enable-auto-tool-choice",
        help="refuse to start without a parser of tool calls; with one, tools always work",
    )
    excludes_unused_tools: bool = option(
        False,
        flag="--exclude-tools-when-tool-choice-none",
        help="leave tools out of the prompt where 'tool_choice' is 'none'",
    )
    reasoning_parser: str | None = option(
        None,
        metavar="NAME",
        help="format of the model's reasoning, such as think, glm45 or openai, one of an installed package, "
        "or none (default: detected from the chat template)",
    )
    reasoning_parser_plugin: str | None = option(
        None,
        metavar="PLUGIN",
        help="custom parser of reasoning, which --reasoning-parser names: module:Class, or a file of Python",
        example="parsers.py",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "tool_call_parser", _name(self.tool_call_parser, self.tool_parser_plugin))
        object.__setattr__(self, "reasoning_parser", _name(self.reasoning_parser, self.reasoning_parser_plugin))
        super().__post_init__()

    def conflicts(self) -> Iterator[Problem]:
        """Adds names of parsers that do not exist."""
        yield from super().conflicts()
        yield from _missing_parser("tool_call_parser", self.tool_call_parser, self.tool_parser_plugin)
        yield from _missing_parser("reasoning_parser", self.reasoning_parser, self.reasoning_parser_plugin)


def _name(name: str | None, plugin: str | None) -> str | None:
    """A plug-in without a name has that of its class, or of its file."""
    if name in (None, "") and plugin is not None:
        return plugin.rpartition("/")[2].removesuffix(".py").rpartition(":")[2]
    return name or None


def _missing_parser(option_name: str, name: str | None, plugin: str | None) -> Iterator[Problem]:
    """The problem of a parser that does not exist, found without executing a plug-in."""
    if name in (None, NO_PARSER):
        return
    from llmstack_output_parsers import UnknownParserError, check_parser

    try:
        check_parser(name, plugin, is_reasoning=option_name == "reasoning_parser")
    except UnknownParserError as error:
        at_fault = option_name if plugin is None else f"{option_name.replace('_call_', '_')}_plugin"
        yield Problem(f"{{{at_fault}}}: {{error}}", error=error)
