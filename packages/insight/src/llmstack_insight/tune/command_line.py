"""The command line of a server with other settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Final

FLAGS: Final = {
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "policy": "--scheduling-policy",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "max_prefill_tokens": "--max-prefill-tokens",
    "num_blocks": "--num-kv-blocks",
}
# What says the same in another unit.
_SAME: Final = {"--num-kv-blocks": ("--num-gpu-blocks-override", "--kv-cache-memory-bytes")}
MAX_LINE_CHARS: Final = 16_384


def split_line(line: str) -> list[str]:
    """The words of a command line.

    Raises:
        ValueError: It has none, or a quotation that does not end.
    """
    if len(line) > MAX_LINE_CHARS:
        raise ValueError(f"has more than {MAX_LINE_CHARS} characters")
    words = shlex.split(line)
    if not words:
        raise ValueError("has no words")
    return words


def with_settings(words: list[str], settings: Mapping[str, str]) -> list[str]:
    """The line with these settings in place of its own."""
    for name, value in settings.items():
        flag = FLAGS[name]
        for old in (flag, *_SAME.get(flag, ())):
            words = without_flag(words, old)
        words = [*words, flag, value]
    return words


def without_flag(words: list[str], flag: str) -> list[str]:
    """The line without a flag that has one value."""
    kept: list[str] = []
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_value:
            is_value = False
        elif name.startswith("--") and name.replace("_", "-") == flag:
            is_value = not equals
        else:
            kept.append(word)
    return kept
