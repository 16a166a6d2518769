"""Tokens that a repository's configuration adds to those of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmstack_llm.model.tokenizer_files.source import MAX_TOKEN_BYTES, MAX_TOKENS, ConversionError
from llmstack_model_files import read_json


def configured_tokens(folder: Path, config: Mapping[str, object]) -> tuple[dict[int, str], frozenset[int]]:
    """Id to content of the tokens of `added_tokens.json` and `added_tokens_decoder`, and the ids of special ones."""
    found: dict[int, str] = {}
    special: set[int] = set()
    for text, number in (read_json(folder, "added_tokens.json", required=False) or {}).items():
        found[_checked(number, text)] = text
    entries = config.get("added_tokens_decoder")
    for key, entry in entries.items() if isinstance(entries, Mapping) else ():
        content = entry.get("content") if isinstance(entry, Mapping) else None
        token_id = _checked(int(key) if key.isascii() and key.isdecimal() and len(key) <= 8 else None, content)
        found[token_id] = str(content)
        if entry.get("special") is True:
            special.add(token_id)
    named = {named_token(config, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    special |= {token_id for token_id, content in found.items() if content in named}
    return found, frozenset(special)


def named_token(config: Mapping[str, object], name: str) -> str | None:
    """A token's text: configurations write it as a string or as an object with `content`."""
    token = config.get(name)
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _checked(token_id: object, content: object) -> int:
    if type(token_id) is not int or not 0 <= token_id < MAX_TOKENS or not isinstance(content, str) or not content:
        raise ConversionError("an added token of the tokenizer's configuration has no text or no id that it may have")
    if len(content) > MAX_TOKEN_BYTES:
        raise ConversionError(f"an added token is longer than {MAX_TOKEN_BYTES} characters")
    return token_id
