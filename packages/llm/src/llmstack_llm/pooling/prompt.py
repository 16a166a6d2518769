"""Tokenization and truncation of prompts to pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmstack_llm import request_errors
from llmstack_llm.requests import PromptInput
from llmstack_llm.text.tokenizer import Tokenizer


class LimitedText(str):
    """A text of which at most so many tokens are part of the prompt, special tokens apart.

    Attributes:
        max_tokens: The limit.
    """

    max_tokens: int

    def __new__(cls, text: str, max_tokens: int) -> LimitedText:
        """The text with its limit."""
        made = super().__new__(cls, text)
        made.max_tokens = max_tokens
        return made


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that become one prompt, as a cross encoder reads them."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class PoolingPrompt:
    """Tokens of a prompt.

    Attributes:
        second_text_start: Where the tokenizer says that the second text of a pair begins; None where it says nothing.
    """

    token_ids: list[int]
    second_text_start: int | None = None


def cut_token_ids(token_ids: Sequence[int], max_tokens: int | None, side: str) -> list[int]:
    """Token ids that a user gave, without any of their own that were to be kept."""
    if max_tokens is None or len(token_ids) <= max_tokens:
        return list(token_ids)
    return list(token_ids[:max_tokens] if side == "right" else token_ids[-max_tokens:])


def encode_pooling_prompt(
    tokenizer: Tokenizer,
    text: str | TextPair,
    *,
    add_special_tokens: bool = True,
    max_tokens: int | None = None,
    side: str = "right",
    param: str = "truncate_prompt_tokens",
) -> PoolingPrompt:
    """Tokenizes; what is cut is text, so that the special tokens around it stay.

    A `LimitedText` is cut to its own limit, whichever is longer. Then the longer text of a pair is cut first, as
    transformers does (`longest_first`).

    Raises:
        InvalidRequestError: `max_tokens` leaves no room beside the special tokens, or token types come in an order that
            has no start of a second text.
    """
    texts = [text] if isinstance(text, str) else [text.first, text.second]
    num_special = tokenizer.num_special_tokens(is_pair=len(texts) == 2) if add_special_tokens else 0
    if max_tokens is not None and max_tokens <= num_special:
        reason = f"this model adds {num_special} tokens to a prompt, which leaves no room for the text"
        raise request_errors.invalid_value(param, reason)
    room = None if max_tokens is None else max_tokens - num_special
    limits = [one.max_tokens if isinstance(one, LimitedText) else None for one in texts]
    token_ids, types = tokenizer.encode_texts(
        texts, add_special_tokens=add_special_tokens, max_text_tokens=room, max_each=limits, side=side
    )
    return PoolingPrompt(token_ids, _second_text_start(types))


def _second_text_start(types: Sequence[int]) -> int | None:
    if 1 not in types:
        return None
    start = types.index(1)
    if any(types[:start]) or set(types[start:]) != {1}:
        raise request_errors.unsupported_value("model", "its tokenizer numbers the texts of a pair in an unknown way")
    return start


def is_limited(prompt: PromptInput | TextPair) -> bool:
    """Whether a text of the prompt has a limit of its own."""
    texts = (prompt.first, prompt.second) if isinstance(prompt, TextPair) else (prompt,)
    return any(isinstance(text, LimitedText) for text in texts)


def num_chars_of(prompt: PromptInput | TextPair) -> int:
    """The characters of a prompt that are to be tokenized, or the bytes of its vectors; none of token ids."""
    if isinstance(prompt, TextPair):
        return len(prompt.first) + len(prompt.second)
    if isinstance(prompt, Mapping):
        vectors = prompt.get("prompt_embeds")
        if vectors is not None:
            return len(vectors) if isinstance(vectors, str | bytes) else getattr(vectors, "nbytes", 0)
        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt") or ""
    return len(prompt) if isinstance(prompt, str | bytes) else 0
