"""Parsing of the model's text into calls, reasoning and content."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmstack_llm import CompletionOutput
from llmstack_output_parsers import (
    ChainedParser,
    NamedCallParser,
    OutputParser,
    ParsedDelta,
    ReasoningParserFactory,
    RequiredCallsParser,
    ToolCallDelta,
    ToolParserFactory,
)
from llmstack_server.chat.deltas import ChatDelta
from llmstack_server.chat.reasoning import ReasoningCounter
from llmstack_server.chat.text_call import TextCallParser
from llmstack_server.chat.tools import ToolMode, ToolUse


@dataclass(frozen=True, slots=True)
class ReasoningPlan:
    """How reasoning and answer are distinguished.

    Attributes:
        is_open: Whether the prompt ends inside reasoning; None where that is unknown.
        is_included: Whether reasoning is part of the answer.
        tag_ids: The tokens of the reasoning tags; None where a tag is not a single token.
        count_tokens: Counts the tokens of a text, where there are no `tag_ids`.
    """

    parser: ReasoningParserFactory
    is_open: bool | None
    is_included: bool
    tag_ids: tuple[int, int] | None
    count_tokens: Callable[[str], int]

    @property
    def starts_with_reasoning(self) -> bool:
        """Whether the output starts with reasoning."""
        by_default = bool(getattr(self.parser, "is_open_by_default", False))
        return by_default if self.is_open is None else self.is_open


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """Parts of the answers of one chat besides content.

    Attributes:
        tool_parser: Set where the model may choose to call a function.
        reasoning: None where the model does not reason, or all text counts as content.
        on_parsed: Called for each text that the tool parser has read, with whether it had a call.
    """

    tool_use: ToolUse
    tool_parser: ToolParserFactory | None = None
    reasoning: ReasoningPlan | None = None
    on_parsed: Callable[[bool], None] | None = None

    @property
    def is_trivial(self) -> bool:
        """Whether all text is content."""
        return self.tool_parser is None and self.reasoning is None and not self.tool_use.is_forced

    @property
    def kept_special_tokens(self) -> tuple[str, ...]:
        """Special tokens that must be part of the text, since parsers need them."""
        of_calls = () if self.tool_parser is None else self.tool_parser.kept_tokens
        of_reasoning = () if self.reasoning is None else self.reasoning.parser.kept_tokens
        return (*of_calls, *of_reasoning)

    def make_parser(self) -> OutputParser:
        """A parser for one answer; only for plans that are not trivial."""
        reasoning, tools = self._make_reasoning_parser(), self._make_tool_parser()
        return functools.reduce(ChainedParser, [parser for parser in (reasoning, tools) if parser is not None])

    def _make_reasoning_parser(self) -> OutputParser | None:
        return None if self.reasoning is None else self.reasoning.parser(is_open=self.reasoning.is_open)

    def _make_tool_parser(self) -> OutputParser | None:
        if self.tool_use.grammar is not None:
            return TextCallParser(self.tool_use.name)
        if self.tool_use.mode is ToolMode.NAMED:
            return NamedCallParser(self.tool_use.name)
        if self.tool_use.mode is ToolMode.REQUIRED:
            return RequiredCallsParser()
        return None if self.tool_parser is None else self.tool_parser(self.tool_use.functions)


class ChoiceParser:
    """Parses the text of one choice.

    Attributes:
        num_reasoning_tokens: Tokens of reasoning so far; known at the end only, where a tag is not a single token.
    """

    def __init__(self, plan: ReadingPlan) -> None:
        self.num_reasoning_tokens = 0
        self._plan = plan
        self._parser = plan.make_parser()
        self._has_calls = False
        self._counter: ReasoningCounter | None = None
        self._reasoning_texts: list[str] = []
        reasoning = plan.reasoning
        if reasoning is not None and reasoning.tag_ids is not None:
            self._counter = ReasoningCounter(*reasoning.tag_ids, is_open=reasoning.starts_with_reasoning)

    def read(self, new: CompletionOutput) -> ChatDelta:
        """The delta of an output."""
        parsed = self._parser.feed(new.text)
        if new.finish_reason is not None:
            parsed = _joined(parsed, self._parser.finish())
        if self._plan.tool_parser is not None and self._plan.on_parsed is not None:
            self._plan.on_parsed(bool(parsed.tool_calls))
        calls = self._wanted(parsed.tool_calls)
        self._has_calls = self._has_calls or bool(calls)
        reasoning = parsed.reasoning
        if self._plan.reasoning is not None:
            self._count(new, reasoning, self._plan.reasoning)
            reasoning = reasoning if self._plan.reasoning.is_included else ""
        return ChatDelta(
            new.index, parsed.content, reasoning, calls, new.token_ids, new.logprobs,
            self._finish_reason(new.finish_reason), new.stop_reason,
        )  # fmt: skip

    def _wanted(self, calls: Sequence[ToolCallDelta]) -> Sequence[ToolCallDelta]:
        """The calls; only the first one without parallel calls."""
        return calls if self._plan.tool_use.is_parallel else [call for call in calls if call.index == 0]

    def _count(self, new: CompletionOutput, text: str, plan: ReasoningPlan) -> None:
        if self._counter is not None:
            self.num_reasoning_tokens += self._counter.count(new.token_ids)
            return
        self._reasoning_texts.append(text)
        if new.finish_reason is not None:
            self.num_reasoning_tokens = plan.count_tokens("".join(self._reasoning_texts))

    def _finish_reason(self, reason: str | None) -> str | None:
        """The finish reason: `tool_calls` for an answer with calls, unless the request named the function."""
        is_call = reason == "stop" and self._has_calls and self._plan.tool_use.mode is not ToolMode.NAMED
        return "tool_calls" if is_call else reason


def _joined(first: ParsedDelta, second: ParsedDelta) -> ParsedDelta:
    return ParsedDelta(
        first.content + second.content, first.reasoning + second.reasoning, (*first.tool_calls, *second.tool_calls)
    )
