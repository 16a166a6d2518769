"""Validation of chat messages, and their form for templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_llm.chat.template_traits import ContentFormat
from llmstack_llm.chat.tool_calls import normal_tool_calls
from llmstack_llm.media.parts import MEDIA_TYPES, MediaMark, MediaPart
from llmstack_types.vocabulary import MediaKind, TextPartType, words_of

PARTS_JOINT = "\n"
MAX_TEMPLATE_KWARGS = 32
MAX_DOCUMENTS = 1024
_TEXT_ONLY = ContentFormat()
_NO_TEXTS: Mapping[MediaKind, str] = {}
_REASONING_NAMES = ("reasoning", "reasoning_content")
_RESERVED_KWARGS = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
    "raise_exception", "strftime_now",
)  # fmt: skip


def normal_messages(
    messages: object,
    content_format: ContentFormat = _TEXT_ONLY,
    media_texts: Mapping[MediaKind, str] = _NO_TEXTS,
) -> list[dict[str, object]]:
    """Copies in the form that templates read; keys without a value are left out.

    Content is text, its parts joined, or a list of parts where the template wants them.

    `media_texts`: What stands for a `MediaMark` in a joined text; these come before the texts, as vLLM puts them.

    Raises:
        InvalidRequestError: Names the message and the field.
    """
    if not isinstance(messages, list | tuple):
        raise request_errors.invalid_type("messages", "an array of messages", messages)
    if not messages:
        raise request_errors.empty_array("messages")
    return [
        _normal_message(f"messages[{index}]", message, content_format, media_texts)
        for index, message in enumerate(messages)
    ]


def normal_documents(documents: object) -> list[dict[str, object]] | None:
    """Copies of the documents that a template may quote.

    Raises:
        InvalidRequestError: Names the entry.
    """
    if documents is None:
        return None
    if not isinstance(documents, list | tuple):
        raise request_errors.invalid_type("documents", "an array of objects", documents)
    if len(documents) > MAX_DOCUMENTS:
        raise request_errors.array_too_long("documents", MAX_DOCUMENTS, len(documents))
    for index, document in enumerate(documents):
        if not isinstance(document, Mapping):
            raise request_errors.invalid_type(f"documents[{index}]", "an object", document)
    return [dict(document) for document in documents]


def check_template_kwargs(kwargs: object) -> dict[str, object]:
    """Scalars under names that hide nothing of ours.

    Raises:
        InvalidRequestError: Names the entry.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise request_errors.invalid_type("chat_template_kwargs", "an object", kwargs)
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise request_errors.too_many_properties("chat_template_kwargs", MAX_TEMPLATE_KWARGS, len(kwargs))
    for name, value in kwargs.items():
        param = f"chat_template_kwargs.{request_errors.echo(name)}"
        if not _is_identifier(name) or name.startswith("_") or name in _RESERVED_KWARGS:
            raise request_errors.invalid_value(param, "this name cannot be set")
        if value is not None and type(value) not in (str, int, float, bool):
            raise request_errors.invalid_type(param, "a string, a number or a boolean", value)
    return dict(kwargs)


def _is_identifier(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and name.isidentifier()


def _normal_message(
    param: str, message: object, content_format: ContentFormat, media_texts: Mapping[MediaKind, str]
) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise request_errors.invalid_type(param, "an object", message)
    role = message.get("role")
    if role is None:
        raise request_errors.missing_parameter(f"{param}.role")
    if not isinstance(role, str):
        raise request_errors.invalid_type(f"{param}.role", "a string", role)
    check_text(f"{param}.role", role)
    content = message.get("content")
    if content is None and role != "assistant":
        raise request_errors.missing_parameter(f"{param}.content")
    normal = {key: value for key, value in message.items() if value is not None}
    if content is not None:
        normal["content"] = _content(f"{param}.content", content, content_format, media_texts)
    if role == "assistant":
        _normalize_assistant(param, normal)
    return normal


def _normalize_assistant(param: str, message: dict[str, object]) -> None:
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = normal_tool_calls(f"{param}.tool_calls", calls)
        message.setdefault("content", "")  # templates add it to a string
    _normalize_reasoning(param, message)


def _normalize_reasoning(param: str, message: dict[str, object]) -> None:
    """Sets the reasoning under both of its names, the newer one first, since templates read either.

    The template of gpt-oss reads `thinking`, and refuses it beside content where there are tool calls.
    """
    text = ""
    for name in _REASONING_NAMES:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise request_errors.invalid_type(f"{param}.{name}", "a string", value)
        check_text(f"{param}.{name}", value)
        if text and value and value != text:
            raise request_errors.invalid_value(f"{param}.{name}", f"it differs from '{_REASONING_NAMES[0]}'")
        text = text or value
    if text:
        message.update(dict.fromkeys(_REASONING_NAMES, text))
        if not (message.get("tool_calls") and message.get("content")):
            message.setdefault("thinking", text)


def _content(
    param: str, content: object, content_format: ContentFormat, media_texts: Mapping[MediaKind, str]
) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        check_text(param, content)
        return [_part(content)] if content_format.wraps_texts else content
    if not isinstance(content, list | tuple):
        raise request_errors.invalid_type(param, "a string or an array of content parts", content)
    if content_format.keeps_parts:
        return [
            {"type": part.kind} if isinstance(part, MediaMark) else _part(_part_text(f"{param}[{index}]", part))
            for index, part in enumerate(content)
        ]
    media = [media_texts[part.kind] for part in content if isinstance(part, MediaMark)]
    texts = [
        _part_text(f"{param}[{index}]", part) for index, part in enumerate(content) if not isinstance(part, MediaMark)
    ]
    return PARTS_JOINT.join([*media, *texts])


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _part_text(param: str, part: object) -> str:
    if isinstance(part, str):
        check_text(param, part)
        return part
    if isinstance(part, MediaPart):
        raise request_errors.unsupported_parameter(f"{part.param}.type", "this model takes text only")
    if not isinstance(part, Mapping):
        raise request_errors.invalid_type(param, "an object", part)
    kind = part.get("type")
    if kind in MEDIA_TYPES:
        raise request_errors.unsupported_parameter(f"{param}.type", "this model takes text only")
    if kind not in words_of(TextPartType):
        raise request_errors.invalid_value(f"{param}.type", "expected 'text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise request_errors.invalid_type(f"{param}.text", "a string", text)
    check_text(f"{param}.text", text)
    return text


def first_unusual_role(messages: Sequence[Mapping[str, object]]) -> int | None:
    """Index of the first message whose role is none of OpenAI's."""
    known = ("system", "developer", "user", "assistant", "tool", "function")
    return next((index for index, message in enumerate(messages) if message["role"] not in known), None)
