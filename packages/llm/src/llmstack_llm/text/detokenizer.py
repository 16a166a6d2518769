"""Incremental detokenization without broken characters."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llmstack_llm.text.tokenizer import Tokenizer
    from llmstack_model_files.token_bytes import TokenBytes

BROKEN = "\ufffd"
_NO_IDS: frozenset[int] = frozenset()
_NO_TOKENS: Mapping[int, str] = MappingProxyType({})
_MAX_HELD_TOKENS = 8  # no character spans more tokens; a decoder that keeps on ending broken is believed after that


class Detokenizer(Protocol):
    """The text of one completion as it grows."""

    def append(self, token_id: int) -> str:
        """The text that this token settles; empty while a character is incomplete. Constant time, amortised."""
        ...

    def finish(self) -> str:
        """The text that was held back, with U+FFFD for incomplete characters."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool = True,
    kept_special_tokens: Iterable[str] = (),
    spaces_between_special_tokens: bool = True,
    is_continuation: bool = False,
) -> Detokenizer:
    """A detokenizer for one completion.

    `kept_special_tokens`: Special tokens that are shown.
    `spaces_between_special_tokens`: False leaves out the space that some decoders, such as WordPiece's, put between
      two added tokens. As in vLLM it needs `skip_special_tokens=False`.
    `is_continuation`: Text stands before it, so a space at its start stays, which sentencepiece decoders drop at the
      start of a text.
    """
    skipped = tokenizer.special_token_ids if skip_special_tokens else _NO_IDS
    if skipped and kept_special_tokens:
        skipped = skipped - {tokenizer.special_tokens.get(content, -1) for content in kept_special_tokens}
    table = tokenizer.token_bytes
    if table is None:
        added = (
            {} if skip_special_tokens or spaces_between_special_tokens else tokenizer.backend.get_added_tokens_decoder()
        )
        return WindowDetokenizer(tokenizer, skipped, {key: token.content for key, token in added.items()})
    if table.is_byte_level:
        return ByteLevelDetokenizer(table, skipped)
    return ByteFallbackDetokenizer(table, skipped, num_stripped=0 if is_continuation else table.num_stripped)


class ByteLevelDetokenizer:
    """GPT-2's scheme: the bytes of all tokens, joined, are UTF-8."""

    def __init__(self, table: TokenBytes, skipped: Collection[int]) -> None:
        self._get = table.get
        self._id_to_text = table.id_to_text
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_held = False

    def append(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        whole = self._id_to_text[token_id]
        if whole is not None and not self._is_held:
            return whole
        piece = self._get(token_id)
        if not piece:
            return ""
        text = self._decoder.decode(piece)
        self._is_held = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """Sentencepiece's scheme: tokens are text, and a run of byte tokens is one string, or one U+FFFD per byte.

    What a run is shows when it ends, so its text is held until then; other tokens are never held.
    """

    def __init__(self, table: TokenBytes, skipped: Collection[int], *, num_stripped: int) -> None:
        self._table = table
        self._skipped = skipped
        self._num_stripped = num_stripped
        self._run = bytearray()

    def append(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._table.get(token_id)
        if piece is None:
            return ""
        byte = self._table.byte_of(token_id)
        if byte is not None:
            self._run.append(byte)
            return ""
        text = piece.decode()
        if self._run:
            text = self._end_run() + text
        return self._strip(text) if self._num_stripped else text

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = BROKEN * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        while self._num_stripped and text.startswith(" "):
            text = text[1:]
            self._num_stripped -= 1
        if text:
            self._num_stripped = 0
        return text


class WindowDetokenizer:
    """Any other decoder: decodes the last tokens with and without the newest, and gives the difference.

    Of tokens in `unspaced` that follow each other the second one is its content, with no space before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, skipped: Collection[int], unspaced: Mapping[int, str] = _NO_TOKENS
    ) -> None:
        self._decode = functools.partial(tokenizer.backend.decode, skip_special_tokens=False)
        self._texts = tokenizer.token_texts
        self._skipped = skipped
        self._unspaced = unspaced
        self._is_after_unspaced = False
        self._window: list[int] = []
        self._prefix_text = ""
        self._num_prefix_tokens = 0

    def append(self, token_id: int) -> str:
        if token_id in self._skipped or self._texts[token_id] is None:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_prefix_tokens
        if text.endswith(BROKEN) and num_held < _MAX_HELD_TOKENS:
            return ""
        new_text = text[len(self._prefix_text) :]
        self._advance(text)
        content = self._unspaced.get(token_id)
        if content is not None and self._is_after_unspaced:
            new_text = content
        self._is_after_unspaced = content is not None
        return new_text

    def finish(self) -> str:
        text = self._decode(self._window)[len(self._prefix_text) :]
        self._window.clear()
        self._prefix_text, self._num_prefix_tokens = "", 0
        return text

    def _advance(self, text: str) -> None:
        """Drops what lies before the newest tokens, unless those alone are no text: the next would seem first."""
        newest = self._window[self._num_prefix_tokens :]
        newest_text = self._texts[newest[0]] if len(newest) == 1 else self._decode(newest)
        if newest_text:
            self._window, self._prefix_text = newest, newest_text
        else:
            self._prefix_text = text
        self._num_prefix_tokens = len(self._window)
