"""Conversion of a conversation to token ids, control tokens apart from text."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_llm.chat.instructions import ROLES, InstructionPlaces
from llmstack_llm.chat.messages import check_template_kwargs, normal_documents, normal_messages
from llmstack_llm.chat.template import ChatTemplate, on_one_line
from llmstack_llm.media.processor import MediaSymbols
from llmstack_llm.requests import ChatPrompt, RenderedPrompt
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import InvalidRequestError
from llmstack_types.vocabulary import MediaKind

logger = logging.getLogger(__name__)

NO_SYMBOLS: Mapping[MediaKind, MediaSymbols] = {}
_OPEN, _CLOSE = "\ue000", "\ue001"


class LengthCheck(Protocol):
    """The check of a rendered text before it is tokenized."""

    def __call__(self, num_chars: int, param: str, *, is_cut: bool = False) -> None: ...


def allow_any_length(num_chars: int, param: str, *, is_cut: bool = False) -> None:
    """The check where the caller has no limits."""


class ChatRenderer:
    """A template with its tokenizer.

    Text that holds no special token's spelling is encoded in one piece with what the template puts around it, which is
    what transformers does. Where a user's string spells a special token, a placeholder takes its place in the template;
    afterwards the text between the template's own special tokens is encoded with special tokens switched off.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        content_format: str = "auto",
        check_length: LengthCheck = allow_any_length,
    ) -> None:
        """`content_format`: `auto`, `string` or `openai`."""
        self._check_length = check_length
        self.template = template
        self.content_format = template.content_format(content_format)
        self.tokenizer = tokenizer
        self._instructions = InstructionPlaces(template, self.content_format)
        longest_first = sorted(filter(None, tokenizer.special_tokens), key=len, reverse=True)
        # The model's tokens, escaped: no pattern comes from a user.
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @property
    def has_system_prompt(self) -> bool:
        """Whether the template shows a system message before the first question."""
        return self._instructions.has_system_prompt

    def render(self, chat: ChatPrompt) -> RenderedPrompt:
        """The prompt as text and as token ids.

        Raises:
            InvalidRequestError: The messages are malformed, the template does not accept them, or the text is too long.
        """
        return self.encode(self.lay_out(chat))

    def lay_out(self, chat: ChatPrompt, symbols: Mapping[MediaKind, MediaSymbols] = NO_SYMBOLS) -> LaidOutChat:
        """The prompt as text, `symbols` in place of each `MediaMark` in the messages; raises as `render`."""
        kwargs = check_template_kwargs(chat.template_kwargs) if chat.template_kwargs else {}
        guard = _Guard(self._special)
        marks = {kind: guard.mark(kind) for kind in symbols}
        messages = normal_messages(chat.messages, self.content_format, marks)
        for message in messages:
            if message["role"] in ROLES:
                messages = self._instructions.fit(messages)
                break
        messages = guard.hide(messages)
        try:
            text = self.template.render(
                messages,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tools=guard.hide(list(chat.tools)) if chat.tools else None,
                documents=None if chat.documents is None else guard.hide(normal_documents(chat.documents)),
                template_kwargs=guard.hide(kwargs) if kwargs else kwargs,
            )
        except InvalidRequestError as error:
            if error.__cause__ is not None:
                logger.warning("the chat template fails on a conversation: %s", on_one_line(str(error.__cause__)))
            raise
        for kind, mark in marks.items():
            text = symbols[kind].put_into(text, mark)
        check_text("messages", text)  # tools and names have not been looked at
        shown = guard.show(text) if guard.hidden else text
        self._check_length(len(shown), "messages", is_cut=chat.is_cut)
        return LaidOutChat(text, guard)

    def encode(self, chat: LaidOutChat) -> RenderedPrompt:
        """The text with its token ids; raises as `render`."""
        text, guard = chat
        add_special_tokens = self.template.source is None
        if not guard.hidden:
            return RenderedPrompt(text, self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return RenderedPrompt(guard.show(text), self._encode_guarded(text, guard, add_special_tokens))

    def _encode_guarded(self, text: str, guard: _Guard, add_special_tokens: bool) -> list[int]:
        token_ids = self.tokenizer.encode("", add_special_tokens=True) if add_special_tokens else []
        pending = ""  # what needs no guard is encoded in pieces as long as possible
        position = 0
        for match in [*self._special.finditer(text), None]:
            end = match.start() if match else len(text)
            run = text[position:end]
            if guard.holds(run):
                token_ids += self.tokenizer.encode(pending, add_special_tokens=False) if pending else []
                token_ids += self._encode_plain(guard.show(run))
                pending = ""
            else:
                pending += run
            pending += match.group() if match else ""
            position = match.end() if match else len(text)
        return token_ids + (self.tokenizer.encode(pending, add_special_tokens=False) if pending else [])

    def _encode_plain(self, text: str) -> list[int]:
        token_ids = self.tokenizer.encode_plain(text)
        if not self.tokenizer.special_token_ids.isdisjoint(token_ids):
            raise request_errors.invalid_value("messages", "the text spells a control token of this model")
        return token_ids


class LaidOutChat(NamedTuple):
    """The text of a prompt, with placeholders for special tokens that users' strings spell, and what they stand for."""

    text: str
    guard: _Guard


class _Guard:
    """Placeholders for the special tokens that users' strings spell; their number cannot be guessed."""

    def __init__(self, special: re.Pattern[str]) -> None:
        self.hidden: list[str] = []
        self._special = special
        self._head = f"{_OPEN}{secrets.randbits(64):020d}"

    def hide(self, value: object) -> Any:
        """The same value with placeholders in all its strings, keys apart."""
        if isinstance(value, str):
            return self._special.sub(self._replace, value)
        if isinstance(value, Mapping):
            return {key: self.hide(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(entry) for entry in value]
        return value

    def mark(self, name: str) -> str:
        """A text that no user's string holds."""
        return f"{self._head}{name}{_CLOSE}"

    def holds(self, text: str) -> bool:
        """True if a placeholder is in the text."""
        return self._head in text

    def show(self, text: str) -> str:
        """The text as the user meant it."""
        return re.sub(f"{self._head}([0-9]+){_CLOSE}", lambda match: self.hidden[int(match.group(1))], text)

    def _replace(self, match: re.Match[str]) -> str:
        self.hidden.append(match.group())
        return f"{self._head}{len(self.hidden) - 1}{_CLOSE}"
