"""The conversation of a request, in the form of any API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and options of a chat, in the form of OpenAI's chat API; unchecked.

    Attributes:
        add_generation_prompt: Whether the prompt ends where an assistant's message begins.
        continue_final_message: Whether the answer continues the last message instead.
        tools: Each `{"type": "function", "function": {"name": ..., "parameters": ...}}`; None for no tools.
        tool_choice: `none`, `auto`, `required`, or an object that names a function; None is `auto` if there are tools.
        parallel_tool_calls: Whether one answer may call several times.
        call_grammar: Lark grammar of the whole answer, which is the text of the call that `tool_choice` names.
        documents: Documents that the template may quote.
        chat_template: Text of a template in place of the model's.
        media_options: Options of the model's processor of pictures and videos.
        reasoning_effort: For the template; `none` asks for no reasoning.
        include_reasoning: Whether the reasoning is part of the answer.
        may_name_files: Whether messages may have media that are named by the ids of uploaded files.
        structured_outputs: This field of the request, whose options hold for the arguments of tools too.
    """

    messages: Sequence[Mapping[str, object]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, object]] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool = True
    call_grammar: str | None = None
    documents: Sequence[Mapping[str, object]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, object] | None = None
    media_options: Mapping[str, object] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    may_name_files: bool = False
    structured_outputs: Mapping[str, object] | None = None
