"""Flags of other engines: why they are refused here, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llmstack_llm.options.option import Option


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag that another engine has and this one has not.

    Attributes:
        reason: The end of a sentence that begins with the flag: why it is refused, and what to use.
        harmless: Values that are accepted, since they ask for what happens anyway; empty text is the flag alone.
        is_switch: No value ever follows it.
    """

    reason: str
    harmless: tuple[str, ...] = ()
    is_switch: bool = False

    def accepts(self, value: str) -> bool:
        """Whether the flag changes nothing with this value."""
        return value.lower() in self.harmless


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
