"""A model's tokenizer with its special tokens."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from llmstack_llm.text.expansion import find_expansion_problem
from llmstack_llm.text.word_piece import content_of, is_word_piece, word_piece_tokenizer
from llmstack_model_files.token_bytes import TokenBytes, token_bytes_of
from llmstack_types import InvalidRequestError, LLMStackError
from llmstack_types.json_values import JSONValue

logger = logging.getLogger(__name__)

MAX_CHARS_ON_LOOP = 8192
"""Longer texts are tokenized in a thread, so that other streams continue; this many take about 2 ms."""

_PARALLELISM = "TOKENIZERS_PARALLELISM"
_BETWEEN_BARS = re.compile(r"<?([|｜]).+\1>?")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(LLMStackError):
    """The folder has no tokenizer that can be used; the text says why in one sentence."""


class TokenTexts(dict[int, str | None]):
    """Token id to the text of the token alone, None for an id without a token; filled as it is asked."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> str | None:
        has_token = self._backend.id_to_token(token_id) is not None
        text = self[token_id] = self._backend.decode([token_id], skip_special_tokens=False) if has_token else None
        return text


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads.

    Attributes:
        backend: The library's own object; its truncation and padding are off.
        named_tokens: `bos_token`, `eos_token` and so on, as chat templates know them.
        special_tokens: Content to id of every special token.
        special_token_ids: Their ids.
        control_tokens: Content to id of these, and of others that look like them, as DeepSeek's `<｜User｜>` does.
        token_bytes: Token id to bytes; None where the decoder is of a kind that has no such table.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, object] | None = None) -> None:
        self.backend = backend
        self.config: Mapping[str, JSONValue] = config or {}
        backend.no_truncation()
        backend.no_padding()
        self.named_tokens = _named_tokens(self.config)
        _add_configured_tokens(backend, self.config, self.named_tokens.values())
        added = backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_token_ids = frozenset(self.special_tokens.values())
        self.control_tokens = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or _BETWEEN_BARS.fullmatch(token.content)
        }
        # The library gives a decoder's settings in no other way; serialising the tokenizer takes 50 times the time.
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        self.token_bytes: TokenBytes | None = token_bytes_of(decoder, backend.id_to_token, backend.token_to_id)

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence id that the tokenizer's configuration names."""
        return self._named_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The begin-of-sequence id that the tokenizer's configuration names."""
        return self._named_id("bos_token")

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, special tokens included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def token_texts(self) -> TokenTexts:
        """The text of each token alone, for all streams together."""
        return TokenTexts(self.backend)

    @functools.cached_property
    def max_chars_per_token(self) -> int | None:
        """No token stands for more characters of a text; None where normalization or stripping may drop characters."""
        added = self.backend.get_added_tokens_decoder().values()
        keeps_all = self.token_bytes is not None and _keeps_every_character(self.backend)
        if not keeps_all or any(token.lstrip or token.rstrip for token in added):
            return None
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    @functools.cached_property
    def plain(self) -> tokenizers.Tokenizer:
        """A second backend that reads special tokens in a text as ordinary characters; made when first needed."""
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @functools.cached_property
    def _without_controls(self) -> tokenizers.Tokenizer:
        """A backend as `plain`, which reads all control tokens as ordinary characters."""
        unmarked = self.control_tokens.keys() - self.special_tokens.keys()
        if not unmarked:
            return self.plain
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in sorted(unmarked)])
        return backend

    def encode(self, text: str, *, add_special_tokens: bool = True, has_controls: bool = True) -> list[int]:
        """Token ids; with `add_special_tokens`, what the tokenizer's own post-processor adds (such as BOS) and no more.

        Without `has_controls` no part of the text is a control token.

        Releases the interpreter lock, which the library's single `encode` does not: a thread may do this beside an
        event loop (measured: 1 MB takes 0.5 s, the loop waits 1 ms).

        Raises:
            InvalidRequestError: An expression of the tokenizer needs too many steps for this text.
        """
        backend = self.backend if has_controls else self._without_controls
        return _encode(backend, [text], add_special_tokens=add_special_tokens)[0].ids

    def num_special_tokens(self, *, is_pair: bool = False) -> int:
        """The number of tokens that the post-processor adds to one text, or to a pair."""
        return self.backend.num_special_tokens_to_add(is_pair)

    def encode_texts(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_text_tokens: int | None = None,
        max_each: Sequence[int | None] = (None, None),
        side: str = "right",
    ) -> tuple[list[int], list[int]]:
        """Token ids of one text, or of two as a pair, and the type of each token, which tells the two apart.

        With `max_text_tokens` the texts are cut at `side` to that many tokens together, the longer one first; before,
        each is cut to its part of `max_each`. Special tokens are not counted and stay.
        """
        parts = _encode(self.backend, list(texts), add_special_tokens=False)
        for part, maximum in zip(parts, max_each, strict=False):
            if maximum is not None:
                part.truncate(maximum, direction=side)
        if max_text_tokens is not None:
            lengths = _shares([len(part) for part in parts], max_text_tokens)
            for part, length in zip(parts, lengths, strict=True):
                part.truncate(length, direction=side)
        second = parts[1] if len(parts) > 1 else None
        whole = self.backend.post_process(parts[0], second, add_special_tokens=add_special_tokens)
        return whole.ids, whole.type_ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is a special token."""
        return _encode(self.plain, [text], add_special_tokens=False)[0].ids

    def encode_uncontrolled(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is a control token."""
        return _encode(self._without_controls, [text], add_special_tokens=False)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids; ids without a token are left out."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token, possibly a part of a character; empty for an id without a token."""
        if self.token_bytes is not None:
            return self.token_bytes.get(token_id) or b""
        return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def text_of(self, token_id: int) -> str:
        """One token alone as text; a part of a character shows as U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def name_of(self, token_id: int) -> str:
        """The vocabulary's string of a token, in which bytes may be spelled as other characters; empty without one."""
        return self.backend.id_to_token(token_id) or ""

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its content."""
        return self.backend.token_to_id(token)

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads `tokenizer.json`, GPT-2's `vocab.json` with `merges.txt`, or BERT's `vocab.txt`, and their configuration.

    Raises:
        TokenizerError: There is neither, or one that cannot be read, or that makes much longer texts of texts.
    """
    from llmstack_model_files import read_json

    config = read_json(folder, "tokenizer_config.json", required=False) or {}
    if "bos_token" not in config and "eos_token" not in config:
        config = (read_json(folder, "special_tokens_map.json", required=False) or {}) | config
    if (folder / "tokenizer.json").is_file():
        backend = _parse(_read(folder, "tokenizer.json"))
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _byte_level_bpe(folder, config)
    elif (folder / "vocab.txt").is_file():
        backend = _word_piece(folder, config)
    else:
        found = "no tokenizer.json, no vocab.json with merges.txt and no vocab.txt"
        raise TokenizerError(f"{folder.name}: {found}; convert the tokenizer first")
    problem = find_expansion_problem(backend)
    if problem:
        raise TokenizerError(f"{folder.name}: the tokenizer is refused: {problem}")
    return Tokenizer(backend, config)


def _encode(backend: tokenizers.Tokenizer, texts: list[str], *, add_special_tokens: bool) -> list[tokenizers.Encoding]:
    try:
        return backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    except BaseException as error:  # the library's panic is no Exception, and it exports no class for it
        if type(error).__name__ != "PanicException":
            raise
        if "thread pool" in str(error) and os.environ.get(_PARALLELISM) != "false":
            # The process may start no more threads. The library tries once, and would give up on every later text.
            os.environ[_PARALLELISM] = "false"
            logger.warning("the tokenizers library cannot start its threads; texts are tokenized without them")
            return _encode(backend, texts, add_special_tokens=add_special_tokens)
        message = "The tokenizer gives up on this text: an expression of it needs too many steps."
        raise InvalidRequestError(message, code="invalid_value") from error


def _read(folder: Path, name: str) -> bytes:
    from llmstack_model_files import open_artifact

    with open_artifact(folder, name) as file:
        return file.read()


def _parse(data: bytes) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception for whatever is wrong in the file
        raise TokenizerError(
            "tokenizer.json cannot be read: it is damaged, or newer than the tokenizers library"
        ) from error


def _byte_level_bpe(folder: Path, config: Mapping[str, object]) -> tokenizers.Tokenizer:
    """GPT-2's own files; other tokenizers that use the same file names split text in other ways and are refused."""
    kind = config.get("tokenizer_class", "GPT2Tokenizer")
    if kind not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        raise TokenizerError(f"{folder.name}: {str(kind)[:64]} needs a tokenizer.json; convert the tokenizer first")
    try:
        vocab = json.loads(_read(folder, "vocab.json"))
        lines = _read(folder, "merges.txt").decode().splitlines()
        merges = [_merge(line) for line in lines if line and not line.startswith("#version")]
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    except (ValueError, TypeError) as error:
        raise TokenizerError(f"{folder.name}: vocab.json or merges.txt is damaged") from error
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    backend.decoder = tokenizers.decoders.ByteLevel()
    bos = content_of(config.get("bos_token"))
    if config.get("add_bos_token") and bos is not None and bos in vocab:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, vocab[bos])]
        )
    return backend


def _shares(lengths: Sequence[int], maximum: int) -> list[int]:
    """The rest of each of at most two lengths when the longer one is cut until the sum is `maximum`."""
    if sum(lengths) <= maximum:
        return list(lengths)
    if len(lengths) == 1:
        return [maximum]
    first, second = lengths
    shorter = min(first, second, maximum // 2)
    return [shorter, maximum - shorter] if first <= second else [maximum - shorter, shorter]


def _word_piece(folder: Path, config: Mapping[str, object]) -> tokenizers.Tokenizer:
    """BERT's own file; other tokenizers with a file of that name are refused."""
    if not is_word_piece(config):
        kind = str(config.get("tokenizer_class"))[:64]
        raise TokenizerError(f"{folder.name}: {kind} needs a tokenizer.json; convert the tokenizer first")
    try:
        return word_piece_tokenizer(_read(folder, "vocab.txt").decode(), config)
    except ValueError as error:
        raise TokenizerError(f"{folder.name}: {error}") from error


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _named_tokens(config: Mapping[str, object]) -> dict[str, str]:
    contents = {name: content_of(config.get(name)) for name in _NAMED_TOKENS}
    return {name: content for name, content in contents.items() if content is not None}


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, JSONValue], named: Any) -> None:
    """Tokens of `tokenizer_config.json` that `tokenizer.json` lacks, and named ones it does not mark as special."""
    for _, entry in sorted(dict(config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        content = content_of(entry)
        if content and backend.token_to_id(content) is None:
            token = AddedToken(content, normalized=False, special=bool(entry.get("special")))
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [content for content in dict.fromkeys(named) if content not in special]
    if missing:
        backend.add_special_tokens([AddedToken(content, normalized=False, special=True) for content in missing])


def _keeps_every_character(backend: tokenizers.Tokenizer) -> bool:
    """True if the normalizer is known to map characters one to one, at most adding some."""
    if backend.normalizer is None:
        return True
    settings = json.loads(backend.normalizer.__getstate__())
    steps = settings["normalizers"] if settings["type"] == "Sequence" else [settings]
    return all(_is_one_to_one(step) for step in steps)


def _is_one_to_one(step: Mapping[str, JSONValue]) -> bool:
    if step["type"] == "Prepend":
        return True
    pattern = step.get("pattern", {}).get("String") if step["type"] == "Replace" else None
    return pattern is not None and len(pattern) <= len(step["content"])
