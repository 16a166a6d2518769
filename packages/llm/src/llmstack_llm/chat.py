"""A conversation to token ids, so that nothing a user writes becomes a control token."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.admit_rules import check_text
from llmstack_llm.chat_messages import check_template_kwargs, normal_documents, normal_messages
from llmstack_llm.chat_template import ChatTemplate
from llmstack_llm.tokenizer import Tokenizer

_OPEN, _CLOSE = "\ue000", "\ue001"


class ChatRenderer:
    """A template with its tokenizer.

    Text that holds no special token's spelling is encoded in one piece with what the template puts around it, which is
    what transformers does. Where a user's string spells a special token, a placeholder takes its place in the template;
    afterwards the text between the template's own special tokens is encoded with special tokens switched off.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, content_format: str = "auto") -> None:
        """`content_format`: `auto`, `string` or `openai`."""
        self.template = template
        self.content_format = template.content_format(content_format)
        self.tokenizer = tokenizer
        longest_first = sorted(filter(None, tokenizer.special_tokens), key=len, reverse=True)
        # The model's tokens, escaped: no pattern comes from a user.
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """The prompt as text and as token ids.

        Raises:
            InvalidRequestError: The messages are malformed, or the template does not accept them.
        """
        kwargs = check_template_kwargs(template_kwargs)
        guard = _Guard(self._special)
        normal = normal_messages(messages, self.content_format)
        given = guard.hide([normal, list(tools) if tools else None, normal_documents(documents), kwargs])
        text = self.template.render(
            given[0],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=given[1],
            documents=given[2],
            template_kwargs=given[3],
        )
        check_text("messages", text)  # tools and names have not been looked at
        add_special_tokens = self.template.is_fallback
        if not guard.hidden:
            return text, self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return guard.show(text), self._encode_guarded(text, guard, add_special_tokens)

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


class _Guard:
    """Placeholders for the special tokens that users' strings spell; their number cannot be guessed."""

    def __init__(self, special: re.Pattern[str]) -> None:
        self.hidden: list[str] = []
        self._special = special
        self._head = f"{_OPEN}{secrets.randbits(64):020d}"
        self._placeholder = re.compile(f"{self._head}([0-9]+){_CLOSE}")

    def hide(self, value: Any) -> Any:
        """The same value with placeholders in all its strings, keys apart."""
        if isinstance(value, str):
            return self._special.sub(self._replace, value)
        if isinstance(value, Mapping):
            return {key: self.hide(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(entry) for entry in value]
        return value

    def holds(self, text: str) -> bool:
        """True if a placeholder is in the text."""
        return self._head in text

    def show(self, text: str) -> str:
        """The text as the user meant it."""
        return self._placeholder.sub(lambda match: self.hidden[int(match.group(1))], text)

    def _replace(self, match: re.Match[str]) -> str:
        self.hidden.append(match.group())
        return f"{self._head}{len(self.hidden) - 1}{_CLOSE}"
