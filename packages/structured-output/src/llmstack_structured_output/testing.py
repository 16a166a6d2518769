"""A tokenizer without a model, for tests and examples: one token per byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

BYTE_VOCAB_SIZE = 257
EOS_TOKEN_ID = 256
_NONE: Mapping[str, bool] = {}


def write_byte_tokenizer(folder: Path, end: str = "<eos>", added: Mapping[str, bool] = _NONE) -> None:
    """Writes a `tokenizer.json` in which token b is the byte b, and token 256 ends a text.

    `end`: The name of that token.
    `added`: Names of the tokens from 257 on, and whether each is a special one.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    names = {end: True, **added}
    added_tokens = [
        {"id": EOS_TOKEN_ID + index, "content": name, "special": is_special, **flags}
        for index, (name, is_special) in enumerate(names.items())
    ]
    tokenizer = {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": {char: byte for byte, char in enumerate(_spellings())}, "merges": []},
        "added_tokens": added_tokens,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _spellings() -> list[str]:
    """GPT-2's printable character for each byte."""
    shifted = iter(range(256, 512))
    return [chr(byte) if _is_printable(byte) else chr(next(shifted)) for byte in range(256)]


def _is_printable(byte: int) -> bool:
    return 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
