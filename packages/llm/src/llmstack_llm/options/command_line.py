"""Options as flags of an `argparse` parser."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llmstack_llm.options.foreign import ForeignFlag
from llmstack_llm.options.option import Option, key_flags
from llmstack_llm.options.value_type import as_text
from llmstack_types.options import REQUIRED

FOREIGN = "foreign flags"
"""Attribute of a namespace: the flags of other engines that a line holds, each with its value."""


class Given(NamedTuple):
    """An option in one place of a command line; `words` are empty for a flag without its value."""

    flag: str
    words: tuple[str, ...]


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Declares the flags of `options`, in a group for each title."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        if option.declared.flag:
            group = groups.get(option.title) or parser.add_argument_group(option.title)
            groups[option.title] = group
            _add_flags(group, option)


def add_key_flags(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Declares flags of other engines that set one key of an option, which `--help` does not show.

    A `CommandParser` puts `stands_for` in their place; other parsers refuse them.
    """
    for name, key in key_flags(options).items():
        action: Any = parser.add_argument(
            name, action=_StandIn, dest=FOREIGN, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        action.stands_for = key
        action.reason = f"the same as {key}"  # for `--help=flag`


def add_foreign_flags(parser: argparse.ArgumentParser, flags: Mapping[str, ForeignFlag]) -> None:
    """Declares flags of other engines, which `--help` does not show."""
    for name, flag in flags.items():
        nargs: Any = 0 if flag.is_switch else "*" if flag.is_list else "?"
        names = [name, f"--no-{name.removeprefix('--')}"] if flag.is_switch else [name]
        names += [flag.short] if flag.short else []
        action: Any = parser.add_argument(
            *names, action=_Collect, dest=FOREIGN, nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        action.reason = flag.reason  # for `--help=flag`


def given_in(namespace: argparse.Namespace, dest: str) -> tuple[Given, ...]:
    """All places of the parsed line that give an option, in the order of the line."""
    found: tuple[Given, ...] = getattr(namespace, dest, ())
    return found


def positional_dest(option: Option) -> str:
    """The name under which a namespace keeps the positional form of an option, apart from its flag."""
    return f"{option.key}_tag"


def help_text(option: Option) -> str:
    """The option's help with its default."""
    text, default = option.declared.help, option.command_default
    if option.declared.example:
        text += f", such as {option.declared.example}"
    if "(default" in text or default in (None, REQUIRED, (), {}, ""):
        return text
    if option.is_switch:
        return f"{text} (default: on)" if default and option.declared.sets else text
    return f"{text} (default: {default_text(option)})"


def default_text(option: Option) -> str:
    """The default as it is written on a command line."""
    default = option.command_default
    if option.declared.show is not None:
        return option.declared.show(default)
    if isinstance(default, tuple):
        return " ".join(map(as_text, default))
    return f"{default:g}" if isinstance(default, float) else as_text(default)


_BASE_TO_WORD: Mapping[type, str] = {int: "N", dict: "JSON"}


def value_text(option: Option) -> str:
    """The placeholder of the value in help: its choices, or a word."""
    if option.choices and not option.type.is_list:
        return "{" + ",".join(option.choices) + "}"
    return option.declared.metavar or _BASE_TO_WORD.get(option.type.base) or option.key.rpartition("_")[2].upper()


def _add_flags(group: argparse._ArgumentGroup, option: Option) -> None:
    add, said = group.add_argument, option.declared
    common: dict[str, Any] = {
        "action": _Collect, "dest": option.key, "default": argparse.SUPPRESS, "help": _escaped(option),
    }  # fmt: skip
    if said.positional:
        dest = positional_dest(option)
        add(dest, metavar=said.positional, nargs="?", help=_escaped(option), action=_Collect, default=argparse.SUPPRESS)
        common["help"] = f"the same as the positional {said.positional}, which wins where both are given"
    if option.is_switch:
        has_pair = option.command_default is None or option.command_default is said.sets
        shown = (*option.flags, *option.negative_flags) if has_pair else option.flags
        hidden = [name for name in option.negative_flags if name not in shown]
        add(*shown, nargs=0, **common)
        if hidden:
            add(*hidden, nargs=0, **common | {"help": argparse.SUPPRESS})
        return
    nargs = "+" if option.type.is_list else None if said.value_without_text is None else "?"
    text = value_text(option)
    action = add(*option.flags, nargs=nargs, metavar=text, **common)
    action.choices = ShownChoices(option.choices) if option.choices else None
    if said.value_without_text is not None:
        action.const = said.value_without_text


def _escaped(option: Option) -> str:
    """argparse reads `%` in help as a format."""
    return help_text(option).replace("%", "%%")


class ShownChoices(tuple[str, ...]):
    """Choices for completion; whether a value is one of them is checked together with all other options."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return True


class _StandIn(argparse.Action):
    stands_for = ""

    def __call__(self, *_: object) -> None:
        raise argparse.ArgumentError(self, f"use {self.stands_for}")


class _Collect(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or str(self.metavar)
        if self.nargs == 0 and self.dest != FOREIGN:
            words: tuple[str, ...] = ("false" if flag.startswith("--no-") else "true",)
        else:
            words = () if values is None else (values,) if isinstance(values, str) else tuple(values)
        setattr(namespace, self.dest, (*given_in(namespace, self.dest), Given(flag, words)))
