"""Renders a model's chat template in jinja2's sandbox, as transformers does, or the plain fallback."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from llmstack_llm import request_errors
from llmstack_llm.chat_messages import PARTS_JOINT, first_unusual_role
from llmstack_types import InvalidRequestError, LLMStackError

MAX_RENDERED_CHARS = 32 * 2**20
MAX_TEMPLATE_CHARS = 2**20


class ChatTemplateError(LLMStackError, ValueError):
    """The template cannot be used at all; the text says why in one sentence."""


class ChatTemplate:
    """One compiled template.

    Attributes:
        source: Its text; None for the plain fallback: the messages' texts, joined by newlines.
    """

    def __init__(self, source: str | None, named_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._named_tokens = dict(named_tokens or {})
        self._template = None if source is None else _compile(source)

    @property
    def is_fallback(self) -> bool:
        """True where the model has no template."""
        return self.source is None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
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
            "messages": _tagged(messages, tag), "tools": tools, "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        text = self._generate(names, messages)
        return _cut_at(text, tag, messages) if tag else text

    def _generate(self, names: dict[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
        if self._template is None:
            return ""
        pieces, num_chars = [], 0
        try:
            for piece in self._template.generate(names):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise request_errors.invalid_value("messages", "the rendered conversation is too long")
        except InvalidRequestError:
            raise
        # A template is a program of the model's author: whatever it runs into is about these messages.
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise _rejected(messages) from error
        return "".join(pieces)


def find_chat_template(
    folder: Path | None, tokenizer_config: Mapping[str, Any], *, override: str | None = None, has_tools: bool = False
) -> str | None:
    """The template's text: `override` (a path or the template), `chat_template.jinja`, or in the configuration.

    Raises:
        ChatTemplateError: The override is no file and no template, or there are several templates and no default.
    """
    if override is not None:
        return _override(override)
    if folder is not None and (folder / "chat_template.jinja").is_file():
        from llmstack_model_files import open_artifact

        with open_artifact(folder, "chat_template.jinja") as file:
            return file.read(4 * MAX_TEMPLATE_CHARS).decode()
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, Mapping):
        named = dict(found)
        found = (named.get("tool_use") if has_tools else None) or named.get("default")
        if found is None:
            raise ChatTemplateError(
                "the model has several chat templates and none is named 'default'; choose one by path"
            )
    return found if isinstance(found, str) else None


def _override(value: str) -> str:
    is_template = "{" in value or "\n" in value
    if is_template:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except OSError:
        raise ChatTemplateError("chat template: no such file, and the text holds no template expression") from None


def _tagged(messages: Sequence[Mapping[str, Any]], tag: str) -> list[Mapping[str, Any]]:
    if not tag:
        return list(messages)
    last = messages[-1]
    if not isinstance(last.get("content"), str):
        raise request_errors.invalid_value("continue_final_message", "the final message has no text to continue")
    return [*messages[:-1], {**last, "content": last["content"] + tag}]


def _cut_at(text: str, tag: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The tag ends with a space: where the template has trimmed that, it would have trimmed the message's own too."""
    bare = tag.rstrip()
    position = text.rfind(bare)
    if position < 0:
        raise _rejected(messages)
    is_trimmed = not text.startswith(tag, position)
    return text[:position].rstrip() if is_trimmed else text[:position]


def _rejected(messages: Sequence[Mapping[str, Any]]) -> InvalidRequestError:
    index = first_unusual_role(messages)
    param = "messages" if index is None else f"messages[{index}].role"
    return request_errors.invalid_value(param, "the model's chat template does not accept this conversation")


def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template is no valid jinja2: {str(error)[:200]}") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """The body as a block of its own, so that names set in it stay in it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> str:
        return str(caller())


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own filter escapes HTML, which no prompt wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
