"""JSON values written piece by piece: `--flag.key.inner 4` beside, or in place of, `--flag '{"key": {"inner": 4}}'`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from llmstack_command.errors import CommandLineError


def fold_dotted_flags(arguments: Sequence[str]) -> list[str]:
    """Each flag that is given with dots comes once, as `--flag=JSON`, where its first piece stood.

    A value that is no JSON is text. The flag's own JSON object, if it is given too, is what the pieces are put into.

    Raises:
        CommandLineError: A piece has no value, or lies inside another piece that is no object.
    """
    dotted = {flag.partition(".")[0] for flag, _ in _words(arguments) if _is_dotted(flag)}
    if not dotted:
        return list(arguments)
    folded: list[str] = []
    flag_to_value: dict[str, Any] = {}
    flag_to_index: dict[str, int] = {}
    words = iter(arguments)
    for word in words:
        if word == "--":
            folded += [word, *words]
            break
        flag, equals, value = word.partition("=")
        base = flag.partition(".")[0]
        if base not in dotted or not flag.startswith("--"):
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
    """Flag and the value behind its equals sign, for each word before `--`."""
    for word in arguments:
        if word == "--":
            return
        flag, _, value = word.partition("=")
        yield flag, value


def _is_dotted(flag: str) -> bool:
    return flag.startswith("--") and "." in flag


def _value_of(flag: str, words: Iterator[str]) -> str:
    value = next(words, None)
    if value is None or value.startswith("--"):
        raise CommandLineError(f"{flag}: expected one argument")
    return value


def _take(flag_to_value: dict[str, Any], flag: str, text: str) -> None:
    """Puts one piece where it belongs."""
    base, *keys = flag.split(".")
    value = _parsed(text)
    if not keys:
        if not isinstance(value, dict):
            raise CommandLineError(f"{flag}: '{text[:64]}' is no JSON object")
        flag_to_value[base] = value | flag_to_value.get(base, {})
        return
    inner = flag_to_value.setdefault(base, {})
    for key in keys[:-1]:
        inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner
    if not isinstance(inner, dict):
        raise CommandLineError(f"{flag}: the value it belongs into is no JSON object")
    inner[keys[-1]] = value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
