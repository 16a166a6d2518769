"""Bytes and texts of single tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

MAX_BYTE = 255


class TokenBytes:
    """Token id to bytes, looked up once per id.

    Attributes:
        id_to_text: Token id to text, None where the bytes of the token alone are no text.
        is_byte_level: True for GPT-2's scheme, where any token may end inside a character. False for sentencepiece's,
            where tokens are text, except byte tokens such as `<0xE2>`.
        num_stripped: Spaces that a decode drops at the very start of a text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, is_byte_level: bool, space: str = "", num_stripped: int = 0):
        self.is_byte_level = is_byte_level
        self.num_stripped = num_stripped
        self._backend = backend
        self._space = space
        self._id_to_bytes: dict[int, bytes | None] = {}
        self.id_to_text: Mapping[int, str | None] = _Texts(self)
        self._byte_token_ids = {} if is_byte_level else _byte_tokens(backend)
        self._char_to_byte = _byte_level_alphabet()

    def get(self, token_id: int) -> bytes | None:
        """None for an id without a token, which a decode leaves out."""
        try:
            return self._id_to_bytes[token_id]
        except KeyError:
            return self._id_to_bytes.setdefault(token_id, self._compute(token_id))

    def byte_of(self, token_id: int) -> int | None:
        """The byte that a byte token of a sentencepiece vocabulary stands for; None for other tokens."""
        return self._byte_token_ids.get(token_id)

    def _compute(self, token_id: int) -> bytes | None:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return None
        if self.is_byte_level:
            try:
                return bytes([self._char_to_byte[char] for char in token])
            except KeyError:  # an added token, written as itself
                return token.encode()
        byte = self._byte_token_ids.get(token_id)
        return token.replace(self._space, " ").encode() if byte is None else bytes([byte])


class _Texts(dict[int, str | None]):
    """Texts of tokens, each decoded when it is first looked up."""

    def __init__(self, table: TokenBytes) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> str | None:
        try:
            text: str | None = (self._table.get(token_id) or b"").decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def token_bytes_of(backend: tokenizers.Tokenizer) -> TokenBytes | None:
    """The table of this tokenizer, or None if its decoder is of neither kind."""
    # The library gives a decoder's settings in no other way; serialising the whole tokenizer takes 50 times as long.
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(backend, is_byte_level=True)
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return _sentencepiece(backend, steps)
    return None


def _sentencepiece(backend: tokenizers.Tokenizer, steps: list[dict[str, Any]]) -> TokenBytes | None:
    pattern, content = steps[0]["pattern"].get("String"), steps[0]["content"]
    strip: dict[str, Any] = steps[3] if len(steps) > 3 else {"content": " ", "start": 0, "stop": 0}
    if not pattern or content != " " or strip["content"] != " " or strip["stop"] != 0:
        return None
    return TokenBytes(backend, is_byte_level=False, space=pattern, num_stripped=strip["start"])


def _byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Id to byte; digits in either case count, as for the tokenizers library."""
    digits = "0123456789abcdefABCDEF"
    pairs = (high + low for high in digits for low in digits)
    found = {backend.token_to_id(f"<0x{pair}>"): int(pair, 16) for pair in pairs}
    return {token_id: byte for token_id, byte in found.items() if token_id is not None}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes: printable ones are themselves, the others follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(MAX_BYTE + 1) if byte not in set(printable)]
    return alphabet | {chr(MAX_BYTE + 1 + index): byte for index, byte in enumerate(others)}
