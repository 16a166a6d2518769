"""A tokenizer whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_llm.text.tokenizer import Tokenizer


class ByteTokenizer(Tokenizer):
    """A tokenizer whose tokens are bytes, which has no library behind it."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """`names`: Of the control characters from 1 on, as special tokens have them."""
        self._names = list(names)
        self.config = {"tokenizer_class": "ByteTokenizer"}

    def encode(self, text: str, *, add_special_tokens: bool = True, has_controls: bool = True) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the bytes."""
        return bytes(token_ids).decode("utf-8", "replace")

    def name_of(self, token_id: int) -> str:
        """The vocabulary's string of a token."""
        return chr(token_id)

    def text_of(self, token_id: int) -> str:
        """One byte as text."""
        return self.decode([token_id])

    def token_to_id(self, token: str) -> int | None:
        """The byte of a text of one byte, or the control character of a name."""
        if token in self._names:
            return self._names.index(token) + 1
        return token.encode()[0] if len(token.encode()) == 1 else None
