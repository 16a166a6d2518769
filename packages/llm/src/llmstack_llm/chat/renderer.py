"""Conversion of a conversation to token ids, control tokens apart from text."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Mapping
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
    what transformers does. Where a user's string spells a special token, alone or with what the template writes behind
    it, a placeholder takes its place in the template. Afterwards the text between the template's own special tokens is
    encoded with special tokens switched off.
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
        self._spellings = _Spellings.of(tokenizer.control_tokens)
        self._control_ids = frozenset(tokenizer.control_tokens.values())

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
        guard = _Guard(self._spellings)
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
        if guard.ends:
            text = guard.settled(text)
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
        for match in [*self._spellings.whole.finditer(text), None]:
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
        token_ids = self.tokenizer.encode_uncontrolled(text)
        if not self._control_ids.isdisjoint(token_ids):
            raise request_errors.invalid_value("messages", "the text spells a control token of this model")
        return token_ids


class LaidOutChat(NamedTuple):
    """The text of a prompt, with placeholders for special tokens that users' strings spell, and what they stand for."""

    text: str
    guard: _Guard


class _Spellings(NamedTuple):
    """The spellings of special tokens, as patterns that find them in texts.

    Attributes:
        whole: Matches any of them, the longest first.
        begins: Matches the characters that they begin with, letters and digits apart: roles and types are words.
        beginnings: What is less than a token, and begins with such a character.
        longest: Characters of the longest of these.
    """

    whole: re.Pattern[str]
    begins: re.Pattern[str]
    beginnings: frozenset[str]
    longest: int

    @classmethod
    def of(cls, tokens: Iterable[str]) -> _Spellings:
        """The spellings of a tokenizer's tokens, which are escaped: no pattern comes from a user."""
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        marked = [token for token in longest_first if not token[0].isalnum()]
        beginnings = frozenset(token[:size] for token in marked for size in range(1, len(token)))
        characters = "".join(sorted({re.escape(token[0]) for token in marked}))
        return cls(
            re.compile("|".join(map(re.escape, longest_first)) or "(?!)"),
            re.compile(f"[{characters}]" if characters else "(?!)"),
            beginnings,
            max(map(len, beginnings), default=0),
        )


class _Guard:
    """Placeholders for the special tokens that users' strings spell; their number cannot be guessed.

    A beginning of one at the end of a string has one too, since a template may write another string behind it.
    """

    def __init__(self, spellings: _Spellings) -> None:
        self.hidden: list[str] = []
        self.ends: set[str] = set()  # those that are the end of a string
        self._numbers: dict[str, int] = {}  # text to its place in `hidden`
        self._spellings = spellings
        self._head = f"{_OPEN}{secrets.randbits(64):020d}"
        self._pattern = f"{self._head}([0-9]+){_CLOSE}"

    def hide(self, value: object) -> Any:
        """The same value with placeholders in all its strings and keys; the same text has the same one."""
        if isinstance(value, str):
            whole, begins, beginnings, longest = self._spellings
            text = whole.sub(self._replace, value)
            end = len(text.rstrip())  # templates trim
            for match in begins.finditer(text, max(0, end - longest), end):
                beginning = text[match.start() : end]
                if beginning in beginnings:
                    self.ends.add(beginning)
                    return text[: match.start()] + self._placeholder(beginning) + text[end:]
            return text
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(entry) for key, entry in value.items()}
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
        return re.sub(self._pattern, lambda match: self.hidden[int(match.group(1))], text)

    def settled(self, text: str) -> str:
        """The prompt with the ends of strings in place of placeholders, where they make no token with what follows."""
        pieces, position, behind = [], len(text), ""
        for match in reversed([*re.finditer(self._pattern, text)]):
            hidden, between = self.hidden[int(match.group(1))], text[match.end() : position]
            behind = (between + behind)[: self._spellings.longest]
            token = self._spellings.whole.search(hidden + behind)
            is_plain = hidden in self.ends and (token is None or token.start() >= len(hidden))
            pieces += [between, hidden if is_plain else match.group()]
            position, behind = match.start(), hidden + behind
        return "".join([text[:position], *reversed(pieces)])

    def _replace(self, match: re.Match[str]) -> str:
        return self._placeholder(match.group())

    def _placeholder(self, text: str) -> str:
        if text not in self._numbers:
            self._numbers[text] = len(self.hidden)
            self.hidden.append(text)
        return f"{self._head}{self._numbers[text]}{_CLOSE}"
