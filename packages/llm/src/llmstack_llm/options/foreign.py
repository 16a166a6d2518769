"""Flags of other engines: which are refused, which have no effect, and why."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from llmstack_llm.options.option import Option
from llmstack_llm.options.value_type import shown


class ForeignFlag(NamedTuple):
    """A flag of another engine that llmstack does not have.

    Attributes:
        reason: The end of a sentence that begins with the flag: why it is refused, and what to use. Of a flag that is
            accepted: why it changes neither tokens nor log-probabilities nor limits nor security.
        harmless: Values that are accepted, since they ask for what happens anyway; empty text is the flag alone.
        is_switch: No value ever follows it.
        is_accepted: Any value is accepted with a line in the log.
        is_json: The value is a JSON object; of an accepted flag it is only read where it may hold refused keys.
        is_list: Several values may follow.
        refused_keys: Keys of the JSON object that would change answers, and are refused.
        short: Its short form.
    """

    reason: str
    harmless: tuple[str, ...] = ()
    is_switch: bool = False
    is_accepted: bool = False
    is_json: bool = False
    is_list: bool = False
    refused_keys: tuple[str, ...] = ()
    short: str = ""

    def accepts(self, value: str) -> bool:
        """Whether the flag changes nothing with this value."""
        return value.lower() in self.harmless

    def refusal(self, value: str) -> str:
        """The end of a sentence that begins with the flag: why this value is refused; empty where it is accepted."""
        if self.accepts(value):
            return ""
        if not self.is_accepted:
            return self.reason
        return self._json_refusal(value) if self.is_json and self.refused_keys else ""

    def _json_refusal(self, value: str) -> str:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return f"{shown(value)} is not valid JSON"
        if type(found) is int:  # the short form of a compilation's mode
            return ""
        if not isinstance(found, dict):
            return f"{shown(value)} is not a JSON object"
        refused = [key for key in self.refused_keys if found.get(key)]
        return f"{', '.join(refused)} would change log-probabilities and is not available" if refused else ""


class AcceptedFlag(NamedTuple):
    """A flag of another engine that a line or a file has, and that changes nothing here.

    Attributes:
        flag: As it was written.
        source: Where it was written.
        reason: Why it has no effect.
    """

    flag: str
    value: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{' '.join(filter(None, (self.flag, self.value)))} has no effect: {self.reason}"


def foreign_flag(flags: Mapping[str, ForeignFlag], name: str) -> ForeignFlag | None:
    """The flag with that name, that short form, or that `--no-` form."""
    if name in flags:
        return flags[name]
    positive = f"--{name.removeprefix('--no-')}"
    if name.startswith("--no-") and positive in flags and flags[positive].is_switch:
        return flags[positive]
    return next((flag for flag in flags.values() if flag.short and flag.short == name), None)


def value_of(name: str, words: Sequence[str]) -> str:
    """The value of a flag; `false` for a `--no-` form."""
    return "false" if name.startswith("--no-") else " ".join(words)


def replaced_flags(options: Iterable[Option]) -> Mapping[str, ForeignFlag]:
    """The flags that options say they replace, each with the advice to use that option."""
    return {
        name: ForeignFlag(_advice(option), harmless)
        for option in options
        for name, harmless in option.declared.replaces.items()
    }


def _advice(option: Option) -> str:
    flag, example = option.declared.flag, option.declared.example
    return f"use {flag}, such as {flag} '{example}'" if example else f"use {flag}"
