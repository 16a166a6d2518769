"""Effective options and their sources."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from llmstack_llm.options.command_line import FOREIGN, given_in, positional_dest
from llmstack_llm.options.foreign import AcceptedFlag, ForeignFlag, foreign_flag, value_of
from llmstack_llm.options.option import Option, OptionGroup, options_of
from llmstack_llm.options.problem import OptionsError, Problem
from llmstack_llm.options.value_type import as_text
from llmstack_types.options import REQUIRED

DEFAULT = "default"
COMMAND_LINE = "command line"
HIDDEN = "(hidden)"
_ACCEPTED = "accepted flags"
_MAX_COLUMN = 40
_Group = TypeVar("_Group", bound=OptionGroup)


class ConfigFile(NamedTuple):
    """A file of options as it was read: flag such as `--port`, or `--x.key` for a key of JSON, to its value.

    Attributes:
        flag: The option that names the file, for sentences.
    """

    path: str
    flag_to_value: Mapping[str, Any]
    flag: str = "--config"


class Setting(NamedTuple):
    """The effective value of an option, and its source in words."""

    option: Option
    value: Any
    source: str = DEFAULT


class Settings:
    """All effective options of a command.

    `problems`: A sentence for each option at fault. The setting of such an option is its default.
    `warnings`: Sentences about what has no effect.
    `accepted`: Flags of other engines that were accepted without effect.
    """

    def __init__(
        self,
        settings: Iterable[Setting],
        problems: Sequence[str] = (),
        faulty: Iterable[str] = (),
        accepted: Sequence[AcceptedFlag] = (),
    ) -> None:
        self.accepted = tuple(accepted)
        self._key_to_setting = {setting.option.key: setting for setting in settings}
        self.problems = list(problems)
        self.warnings: list[str] = []
        self._faulty = set(faulty)

    def __getitem__(self, key: str) -> Any:
        return self._key_to_setting[key].value

    def all(self) -> list[Setting]:
        """The options in the order of their declaration."""
        return list(self._key_to_setting.values())

    def is_given(self, key: str) -> bool:
        """Whether the option has another source than its default."""
        return self._key_to_setting[key].source != DEFAULT

    def source(self, key: str) -> str:
        """The source of the option's value."""
        return self._key_to_setting[key].source

    def add_problems(self, problems: Iterable[Problem]) -> None:
        """Adds problems under the names of flags, except for those that follow from an option at fault."""
        self.problems += [problem.named(self.flag) for problem in problems if not self._is_known(problem)]

    def build(self, group: type[_Group], **more: Any) -> _Group | None:
        """A group of options with these values; None, and problems, where its options contradict each other.

        `more`: Fields that are no options, or take the place of options.
        """
        values = {option.name: self[option.key] for option in options_of(group) if option.key in self._key_to_setting}
        try:
            return group(**values | more)
        except OptionsError as error:
            self.add_problems(error.problems)
            return None

    def flag(self, name: str) -> str:
        """The flag of a field, for sentences."""
        options = (setting.option for setting in self._key_to_setting.values())
        return next((option.declared.flag for option in options if option.name == name), name) or name

    def with_defaults(self, options: Iterable[Option]) -> Settings:
        """These settings, and the defaults of the options that they lack."""
        rest = [Setting(option, _default(option)) for option in options if option.key not in self._key_to_setting]
        whole = Settings([*self.all(), *rest], self.problems, self._faulty, self.accepted)
        whole.warnings = self.warnings
        return whole

    def replaced(self, source: str | None = None, /, **values: Any) -> Settings:
        """The same settings with other values, under the keys of their options.

        `source`: Where the values come from; None keeps what is said of them.
        """
        changed = self._key_to_setting | {
            key: self._key_to_setting[key]._replace(value=value, source=source or self.source(key))
            for key, value in values.items()
        }
        replaced = Settings(changed.values(), self.problems, self._faulty, self.accepted)
        replaced.warnings = self.warnings
        return replaced

    def to_plain(self) -> dict[str, Any]:
        """Key to value and source, for another process; secrets are among them."""
        plain: dict[str, object] = {
            key: [setting.value, setting.source] for key, setting in self._key_to_setting.items()
        }
        return plain | {_ACCEPTED: [[flag.flag, flag.value, flag.source, flag.reason] for flag in self.accepted]}

    @classmethod
    def from_plain(cls, options: Sequence[Option], plain: Mapping[str, Any]) -> Settings:
        """The inverse of `to_plain`, whose values have been checked."""
        accepted = [AcceptedFlag(*fields) for fields in plain.get(_ACCEPTED, ())]
        settings = [Setting(option, *plain[option.key]) for option in options if option.key in plain]
        return cls(settings, accepted=accepted)

    def table(self) -> str:
        """A line for each option: flag, value and source; then one for each flag that was accepted without effect."""
        rows = [(setting.option.declared.flag, _shown(setting), setting.source) for setting in self.all()]
        rows += [(flag.flag, flag.value or "-", f"{flag.source}, no effect: {flag.reason}") for flag in self.accepted]
        # A long value widens its own line alone.
        widths = [max(width for row in rows if (width := len(row[column])) <= _MAX_COLUMN) for column in (0, 1)]
        return "\n".join(f"{flag:<{widths[0]}}  {value:<{widths[1]}}  {source}" for flag, value, source in rows)

    def _is_known(self, problem: Problem) -> bool:
        return any(f"{{{name}}}" in problem.text for name in self._faulty)


def resolve(
    options: Sequence[Option],
    namespace: argparse.Namespace,
    environment: Mapping[str, str],
    file: ConfigFile | None = None,
    foreign: Mapping[str, ForeignFlag] | None = None,
) -> Settings:
    """The effective options of a parsed command line; errors are collected, not raised.

    `foreign`: Flags of other engines, which are refused on the line and in the file.
    """
    foreign = foreign or {}
    flags = _ForeignFlags(foreign)
    in_file = _file_values(options, file, flags)
    for given in given_in(namespace, FOREIGN) if foreign else ():
        flags.read(given.flag, given.flag, value_of(given.flag, given.words), COMMAND_LINE)
    found = _Resolution(namespace, environment, in_file, flags)
    settings = [found.setting(option) for option in options if option.declared.flag]
    return Settings(settings, found.problems, found.faulty, flags.accepted)


class _ForeignFlags:
    """Flags of other engines as they are found: problems, and those that are accepted without effect."""

    def __init__(self, flags: Mapping[str, ForeignFlag]) -> None:
        self._flags = flags
        self.problems: list[str] = []
        self.accepted: list[AcceptedFlag] = []

    def read(self, where: str, name: str, value: str, source: str) -> bool:
        """Notes one flag, under `where` in a problem; False if it is none of another engine."""
        flag = foreign_flag(self._flags, name)
        if flag is None:
            return False
        if refusal := flag.refusal(value):
            self.problems.append(f"{where}: {refusal}")
        elif flag.is_accepted and not flag.accepts(value):
            self.accepted.append(AcceptedFlag(name, value, source, flag.reason))
        return True


class _Resolution:
    """One pass over the options."""

    def __init__(
        self,
        namespace: argparse.Namespace,
        environment: Mapping[str, str],
        in_file: Mapping[str, tuple[str, str, list[str]]],
        foreign: _ForeignFlags,
    ) -> None:
        self._namespace = namespace
        self._environment = environment
        self._in_file = in_file
        self._foreign = foreign
        self.problems = foreign.problems
        self.faulty: set[str] = set()

    def setting(self, option: Option) -> Setting:
        """The option's effective value; its default where that is at fault."""
        found = self._from_line(option) or self._from_environment(option) or self._in_file.get(option.key)
        if found is None:
            return Setting(option, _default(option))
        where, source, words = found
        try:
            setting = Setting(option, _value(option, words), source)
            if words and (reason := option.reason_for(words[-1])):
                self._foreign.accepted.append(AcceptedFlag(where, words[-1], source, reason))
            return setting
        except ValueError as error:
            self.problems.append(f"{where}: {error}")
            self.faulty.add(option.name)
            return Setting(option, _default(option))

    def _from_line(self, option: Option) -> tuple[str, str, list[str]] | None:
        positional = given_in(self._namespace, positional_dest(option)) if option.declared.positional else ()
        given = positional or given_in(self._namespace, option.key)
        if not given:
            return None
        words = [word for entry in given for word in entry.words] if option.type.is_list else given[-1].words
        flag = given[-1].flag
        return option.declared.flag if flag == option.declared.short else flag, COMMAND_LINE, list(words)

    def _from_environment(self, option: Option) -> tuple[str, str, list[str]] | None:
        for name in option.variables:
            if text := self._environment.get(name):
                return name, f"environment {name}", [text]
        return None


def _default(option: Option) -> Any:
    return None if option.command_default is REQUIRED else option.command_default


def _value(option: Option, words: Sequence[str]) -> Any:
    if option.type.is_list:
        return tuple(entry for word in words for entry in option.from_text(word))
    return option.from_text(words[-1])


def _file_values(
    options: Sequence[Option], file: ConfigFile | None, foreign: _ForeignFlags
) -> dict[str, tuple[str, str, list[str]]]:
    """Key to what the file says of the option; its problems are added to those of `foreign`."""
    if file is None:
        return {}
    flag_to_option = {flag: option for option in options for flag in (*option.flags, *option.negative_flags)}
    found: dict[str, tuple[str, str, list[str]]] = {}
    source = f"{file.flag} {os.path.basename(file.path)}"
    for flag, value in _joined(file.flag_to_value).items():
        key = flag.removeprefix("--")
        where = f"{file.flag} {file.path}: {key}"
        option = flag_to_option.get(flag)
        if option is None and foreign.read(where, flag, as_text(value), source):
            continue
        if option is None or option.key == "config":
            foreign.problems.append(f"{file.flag} {file.path}: unknown key '{key}'{_nearest(key, flag_to_option)}")
        elif value is not None:
            negated = flag in option.negative_flags
            if not (negated and value is False):
                found[option.key] = (where, source, ["false"] if negated else _words(value, option.type.is_list))
    return found


def _joined(flag_to_value: Mapping[str, object]) -> dict[str, Any]:
    """Keys with dots put into the objects that they belong into."""
    joined: dict[str, Any] = {}
    for flag, value in flag_to_value.items():
        base, *keys = flag.split(".")
        if not keys:
            joined[base] = {**value, **joined.get(base, {})} if isinstance(value, Mapping) else value
            continue
        inner = joined.setdefault(base, {})
        for key in keys[:-1]:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner
        if isinstance(inner, dict):
            inner[keys[-1]] = value
    return joined


def _words(value: object, is_list: bool) -> list[str]:
    return [as_text(entry) for entry in value] if is_list and isinstance(value, list) else [as_text(value)]


def _nearest(key: str, flags: Iterable[str]) -> str:
    import difflib  # late: only a mistyped key needs it

    names = [flag.removeprefix("--") for flag in flags if flag.startswith("--")]
    nearest = difflib.get_close_matches(key, names, n=1)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""


def _shown(setting: Setting) -> str:
    if setting.value is None:
        return "-"
    said = setting.option.declared
    if said.secret:
        return HIDDEN if setting.value else "-"
    if said.show is not None:
        return said.show(setting.value)
    if setting.option.is_switch:
        return as_text(setting.value is said.sets)
    return " ".join(map(as_text, setting.value)) if isinstance(setting.value, tuple) else as_text(setting.value)
