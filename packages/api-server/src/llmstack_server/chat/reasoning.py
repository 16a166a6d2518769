"""The start of reasoning in an answer, and the number of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmstack_output_parsers import ReasoningParserFactory
from llmstack_server.chat.conversation import Conversation
from llmstack_types import ThinkingTags

if TYPE_CHECKING:
    from llmstack_llm.text.tokenizer import Tokenizer


def is_open_in(prompt: str, conversation: Conversation, parser: ReasoningParserFactory) -> bool | None:
    """Whether the prompt ends inside reasoning; False where it ended it, None where that is unknown."""
    if conversation.continue_final_message:
        return _is_open_in_message(conversation, parser)
    end = prompt[-64:].rstrip()
    if end.endswith(parser.start):
        return True
    if end.endswith(parser.end):
        return False
    kwargs = conversation.chat_template_kwargs or {}
    return False if kwargs.get("enable_thinking") is False or kwargs.get("thinking") is False else None


def _is_open_in_message(conversation: Conversation, parser: ReasoningParserFactory) -> bool:
    """Whether a message to continue ends inside reasoning; without tags in its text it is an answer."""
    content = conversation.messages[-1].get("content")
    return isinstance(content, str) and content.rfind(parser.start) > content.rfind(parser.end)


class ReasoningCounter:
    """Counts the reasoning tokens of one answer between the tokens of the tags."""

    def __init__(self, start_id: int, end_id: int, *, is_open: bool) -> None:
        self._start_id = start_id
        self._end_id = end_id
        self._is_open = is_open
        self._is_over = False

    def count(self, token_ids: Sequence[int]) -> int:
        """The number of reasoning tokens among the next tokens; tags do not count."""
        num_tokens = 0
        for token_id in token_ids:
            if self._is_over:
                break
            if token_id == self._start_id:
                self._is_open = True
            elif token_id == self._end_id:
                self._is_over = True
            elif self._is_open:
                num_tokens += 1
        return num_tokens


def tag_ids(tokenizer: Tokenizer, parser: ReasoningParserFactory) -> tuple[int, int] | None:
    """The tokens of the tags; None where a tag is not a single token."""
    start, end = (tokenizer.encode(tag, add_special_tokens=False) for tag in (parser.start, parser.end))
    return (start[0], end[0]) if len(start) == len(end) == 1 else None


def thinking_tags(tokenizer: Tokenizer, parser: ReasoningParserFactory, *, is_open: bool) -> ThinkingTags:
    """The tokens around the reasoning of an answer; `is_open` as in `ThinkingTags`."""
    start, end = (tokenizer.encode(tag, add_special_tokens=False) for tag in (parser.start, parser.end))
    return ThinkingTags(tuple(start), tuple(end), is_open)


def thinking_tags_after(
    tokenizer: Tokenizer, parser: ReasoningParserFactory, prompt: str | Sequence[int]
) -> ThinkingTags:
    """The tokens around the reasoning that continues a prompt: open after a start tag that no end tag follows."""
    tags = thinking_tags(tokenizer, parser, is_open=bool(getattr(parser, "is_open_by_default", False)))
    if isinstance(prompt, str):
        start, end = prompt.rfind(parser.start), prompt.rfind(parser.end)
    else:
        start, end = (_last_of(prompt, ids) for ids in (tags.start_token_ids, tags.end_token_ids))
    return tags if start == end else replace(tags, is_open=start > end)


def _last_of(token_ids: Sequence[int], wanted: Sequence[int]) -> int:
    """The last place at which `wanted` begins; -1 where it does not occur."""
    for index in range(len(token_ids) - len(wanted), -1, -1):
        if token_ids[index] == wanted[0] and list(token_ids[index : index + len(wanted)]) == list(wanted):
            return index
    return -1
