"""Chat templates in jinja2's sandbox, and the plain fallback."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import jinja2

from llmstack_llm import request_errors
from llmstack_llm.chat.messages import PARTS_JOINT, first_unusual_role
from llmstack_llm.chat.template_files import MAX_TEMPLATE_CHARS, ChatTemplateError
from llmstack_llm.chat.template_sandbox import TemplateEnvironment, TemplateRefusalError, TemplateTimeoutError
from llmstack_llm.chat.template_traits import ContentFormat, content_format
from llmstack_types import InvalidRequestError

MAX_RENDERED_CHARS = 32 * 2**20
MAX_REFUSAL_CHARS = 256
_PLACEHOLDER = re.compile("\ue000[0-9]+\ue001")


class ChatTemplate:
    """One compiled template.

    Attributes:
        source: Its text; None for the plain fallback: the messages' texts, joined by newlines.
        tool_source: The text of the model's other template, for conversations with tools; None where one does for all.
        tool_template: That template.
        response_template: How a checkpoint says that answers are read; None where it does not.
    """

    def __init__(
        self,
        source: str | None,
        named_tokens: Mapping[str, str] | None = None,
        *,
        tool_source: str | None = None,
        response_template: object = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self.tool_source = tool_source
        self.response_template = response_template
        self.tool_template = None if tool_source is None else ChatTemplate(tool_source, named_tokens, clock=clock)
        self._environment = TemplateEnvironment(clock)
        self._named_tokens = dict(named_tokens or {})
        self._template = None if source is None else _compile(self._environment, source)

    def content_format(self, setting: str = "auto") -> ContentFormat:
        """How messages are to be given to it; `setting` is `auto`, `string` or `openai`."""
        return content_format(self._environment, self.source, setting)

    @property
    def is_fallback(self) -> bool:
        """True where the model has no template."""
        return self.source is None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text; byte for byte what transformers' `apply_chat_template` gives.

        Raises:
            InvalidRequestError: The template does not accept the messages.
        """
        if continue_final_message and add_generation_prompt:
            reason = "cannot be combined with 'add_generation_prompt'"
            raise request_errors.invalid_value("continue_final_message", reason)
        if self._template is None:
            return PARTS_JOINT.join(str(message.get("content", "")) for message in messages)
        tag = f"{secrets.token_hex(8)} " if continue_final_message else ""
        names = {
            **self._named_tokens, **(template_kwargs or {}),
            "messages": _tagged(messages, tag) if tag else list(messages), "tools": tools, "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        text = self._generate(names, messages)
        return _cut_at(text, tag, messages) if tag else text

    def _generate(self, names: dict[str, object], messages: Sequence[Mapping[str, object]]) -> str:
        if self._template is None:
            return ""
        try:
            with self._environment.limited_time():
                return _join_within_limit(self._template.generate(names))
        except InvalidRequestError:
            raise
        except TemplateTimeoutError:
            reason = "the model's chat template takes too long over this conversation"
            raise request_errors.invalid_value("messages", reason) from None
        except TemplateRefusalError as error:
            raise _rejected(messages, on_one_line(str(error))) from error
        # A template is a program of the model's author: whatever it runs into is about these messages.
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise _rejected(messages) from error


def _join_within_limit(pieces: Iterable[str]) -> str:
    kept, num_chars = [], 0
    for piece in pieces:
        kept.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise request_errors.invalid_value("messages", "the rendered conversation is too long")
    return "".join(kept)


def _tagged(messages: Sequence[Mapping[str, object]], tag: str) -> list[Mapping[str, object]]:
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, list) and content:
        return [
            *messages[:-1],
            {**last, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + tag}]},
        ]
    if not isinstance(content, str):
        raise request_errors.invalid_value("continue_final_message", "the final message has no text to continue")
    return [*messages[:-1], {**last, "content": content + tag}]


def _cut_at(text: str, tag: str, messages: Sequence[Mapping[str, object]]) -> str:
    """The tag ends with a space: where the template has trimmed that, it would have trimmed the message's own too."""
    bare = tag.rstrip()
    position = text.rfind(bare)
    if position < 0:
        raise _rejected(messages)
    is_trimmed = not text.startswith(tag, position)
    return text[:position].rstrip() if is_trimmed else text[:position]


def _rejected(messages: Sequence[Mapping[str, object]], refusal: str = "") -> InvalidRequestError:
    """The error of a conversation that the template does not take; `refusal` is the template's own sentence."""
    index = first_unusual_role(messages)
    param = "messages" if index is None else f"messages[{index}].role"
    reason = "the model's chat template does not accept this conversation"
    if not refusal:
        return request_errors.invalid_value(param, reason)
    return request_errors.invalid_value(param, f"{reason}: {refusal.rstrip('.')}")


def on_one_line(text: str) -> str:
    """A template's text for a message of ours: it may quote the conversation, so it is short."""
    shown = _PLACEHOLDER.sub("...", text[: 2 * MAX_REFUSAL_CHARS])[:MAX_REFUSAL_CHARS]
    clean = "".join(char if char.isprintable() else " " for char in shown.encode("utf-8", "replace").decode())
    return " ".join(clean.split())


def _compile(environment: TemplateEnvironment, source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters")
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template is no valid jinja2: {str(error)[:200]}") from error
