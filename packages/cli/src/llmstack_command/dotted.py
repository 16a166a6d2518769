"""Dotted flags: JSON values given key by key.

`--flag.key.inner 4` means `--flag '{"key": {"inner": 4}}'`, and can be combined with it; `-f.key 4` is the same with
a short form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from llmstack_command.errors import CommandLineError


def fold_dotted_flags(arguments: Sequence[str]) -> list[str]:
    """Replaces the dotted pieces of each flag by one `--flag=JSON` in the place of the first piece.

    A value that is not JSON is text. If the flag has a JSON object too, the pieces are merged into it.

    Raises:
        CommandLineError: A piece has no value, or is inside another piece that is not an object.
    """
    dotted = {flag.partition(".")[0] for flag, _ in _words(arguments) if _is_dotted(flag)}
    if not dotted:
        return list(arguments)
    folded: list[str] = []
    flag_to_value: dict[str, object] = {}
    flag_to_index: dict[str, int] = {}
    words = iter(arguments)
    for word in words:
        if word == "--":
            folded += [word, *words]
            break
        flag, equals, value = word.partition("=")
        base = flag.partition(".")[0]
        if base not in dotted:
            folded.append(word)
            continue
        if base not in flag_to_index:
            flag_to_index[base] = len(folded)
            folded.append(base)
        _take(flag_to_value, flag, value if equals else _value_of(flag, words))
    for base, index in flag_to_index.items():
        folded[index] = f"{base}={json.dumps(flag_to_value[base], ensure_ascii=False)}"
    return folded


def _words(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flag and value after the equals sign, for each word before `--`."""
    for word in arguments:
        if word == "--":
            return
        flag, _, value = word.partition("=")
        yield flag, value


def _is_dotted(flag: str) -> bool:
    name = flag.removeprefix("-").removeprefix("-")
    return name != flag and "." in name and name[:1].isalpha()


def _value_of(flag: str, words: Iterator[str]) -> str:
    value = next(words, None)
    if value is None or value.startswith("--"):
        raise CommandLineError(f"{flag}: expected one argument")
    return value


def _take(flag_to_value: dict[str, Any], flag: str, text: str) -> None:
    """Merges one piece into the value of its flag."""
    base, *keys = flag.split(".")
    value = _parsed(text)
    if not keys:
        if not isinstance(value, dict):
            raise CommandLineError(f"{flag}: '{text[:64]}' is not a JSON object")
        flag_to_value[base] = value | flag_to_value.get(base, {})
        return
    inner = flag_to_value.setdefault(base, {})
    for key in keys[:-1]:
        inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner
    if not isinstance(inner, dict):
        raise CommandLineError(f"{flag}: the surrounding value is not a JSON object")
    inner[keys[-1]] = value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
