"""Flags out of a file: an action that can read settings stands for the flags they name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from llmstack_command.errors import CommandLineError


class SettingsFile(Protocol):
    """What an `argparse.Action` has besides, if its value is a file of further flags."""

    @property
    def option_strings(self) -> Sequence[str]: ...

    def settings(self, path: str) -> Mapping[str, Any]:
        """Flag (`--port`, or with keys of JSON behind it, `--a.b`) to its value; raises argparse.ArgumentTypeError."""
        ...


def _is_settings_file(action: object) -> TypeGuard[SettingsFile]:
    # `isinstance` with a protocol takes 20 us, and there are 200 flags.
    return hasattr(action, "settings")


def words_of_files(
    actions: Sequence[argparse.Action], flag_to_action: Mapping[str, argparse.Action], line: Sequence[str]
) -> list[str]:
    """The words that the settings files on `line` stand for, but for flags that it gives itself.

    Raises:
        CommandLineError: A file cannot be read, or has a key that is no flag; the text names both.
    """
    given = {flag_to_action[base].dest for word in _flag_words(line) if (base := base_of(word)) in flag_to_action}
    words: list[str] = []
    for action in actions:
        if _is_settings_file(action):
            words += _words_of_action(action, flag_to_action, line, given)
    return words


def _words_of_action(
    action: SettingsFile, flag_to_action: Mapping[str, argparse.Action], line: Sequence[str], given: Collection[str]
) -> list[str]:
    name = action.option_strings[0]
    paths = _values_of(action.option_strings, line)
    if len(paths) > 1:
        raise CommandLineError(f"{name}: one file at most")
    words: list[str] = []
    for path in paths:
        for flag, value in _settings(action, name, path).items():
            found = flag_to_action.get(base_of(flag))
            if found is None or _is_settings_file(found):
                raise CommandLineError(f"{name} {path}: {_unknown_key(flag, flag_to_action)}")
            if found.dest not in given:
                words += _words_of(flag, value, found, flag_to_action)
    return words


def _settings(action: SettingsFile, name: str, path: str) -> Mapping[str, Any]:
    try:
        return action.settings(path)
    except argparse.ArgumentTypeError as error:
        raise CommandLineError(f"{name} {path}: {error}") from None


def _unknown_key(flag: str, flag_to_action: Mapping[str, argparse.Action]) -> str:
    import difflib

    shown = [name.removeprefix("--") for name, action in flag_to_action.items() if action.help != argparse.SUPPRESS]
    key = flag.removeprefix("--")
    nearest = difflib.get_close_matches(key, shown, n=1)
    return f"unknown key '{key}'" + (f"; did you mean '{nearest[0]}'?" if nearest else "")


def _words_of(flag: str, value: Any, action: argparse.Action, flags: Collection[str]) -> list[str]:
    """The words that set `flag`; `=` keeps them apart from whatever follows."""
    if value is None:
        return []
    if isinstance(value, bool) and action.nargs == 0:
        negation = "--no-" + flag.removeprefix("--")
        return [flag] if value else [negation] if negation in flags else []
    # The base of the actions that take a flag several times; argparse shows it under no public name.
    if isinstance(value, list) and isinstance(action, argparse._AppendAction):
        return [f"{flag}={_text(entry)}" for entry in value]
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _values_of(option_strings: Collection[str], line: Sequence[str]) -> list[str]:
    words = _before_separator(line)
    found = []
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in option_strings and (equals or index + 1 < len(words)):
            found.append(value if equals else words[index + 1])
    return found


def base_of(word: str) -> str:
    """The flag without its value and without keys of JSON."""
    return word.partition("=")[0].partition(".")[0]


def _flag_words(line: Sequence[str]) -> list[str]:
    return [word for word in _before_separator(line) if word.startswith("-")]


def _before_separator(line: Sequence[str]) -> list[str]:
    """After `--` nothing is a flag."""
    words = list(line)
    return words[: words.index("--")] if "--" in words else words
