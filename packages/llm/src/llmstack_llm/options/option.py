"""Declaration of options as fields of dataclasses."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

from llmstack_llm.options.problem import OptionsError, Problem, values_problems
from llmstack_llm.options.value_type import ValueType, value_type, wrong_choice
from llmstack_types.options import OWN_NAME, REQUIRED, SAME_DEFAULT, Declaration, declaration_of, range_problem

ENVIRONMENT_PREFIX = "LLMSTACK_"

GroupT = TypeVar("GroupT")


class Option(NamedTuple):
    """One declared option.

    Attributes:
        name: The field, and the keyword.
        title: The subject of its group of options.
        default: The default of the keyword; `REQUIRED` for none.
        key: The option in files and in tables: its flag without dashes in front, with `_`; else the field.
        variables: Environment variables, the first one first.
    """

    name: str
    title: str
    type: ValueType
    default: Any
    declared: Declaration
    key: str
    variables: tuple[str, ...]

    @property
    def is_switch(self) -> bool:
        """Whether its flag has no value."""
        return self.type.base is bool and not self.type.is_list

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags that set it; the first is its name."""
        long = (self.declared.flag, *self.declared.also)
        return (*long, self.declared.short) if self.declared.short else long

    @property
    def negative_flags(self) -> tuple[str, ...]:
        """The `--no-` forms of a switch."""
        names = (self.declared.flag, *self.declared.also) if self.is_switch else ()
        return tuple(f"--no-{name.removeprefix('--')}" for name in names)

    @property
    def command_default(self) -> Any:
        """The default of commands."""
        return self.default if self.declared.command_default is SAME_DEFAULT else self.declared.command_default

    @property
    def choices(self) -> tuple[str, ...]:
        """All words that are values, aliases included."""
        aliases = (alias for alias in self.declared.aliases if isinstance(alias, str))
        return (*self.type.choices, *aliases) if self.type.choices else ()

    def from_text(self, text: str) -> Any:
        """The value that a text stands for, on a command line, in a variable or in a file.

        Raises:
            ValueError: It cannot be one; the sentence says why.
        """
        if text == "None" and self.type.is_optional and not (self.type.is_list or self.declared.secret):
            return None
        text = self._spelling(text)
        if text in self.declared.same_as:
            text = self.declared.same_as[text][0]
        if text in self.declared.aliases:
            return self.declared.aliases[text]
        if self.choices and not self.type.is_list and text not in self.choices:
            raise ValueError(wrong_choice(text, self.choices))
        value = (self.declared.read or self._plain_type().read)(text)
        if self.is_switch:
            return value is self.declared.sets
        return self._checked(self._aliased(value))

    def from_keyword(self, value: object) -> Any:
        """The value that a keyword of Python stands for.

        Raises:
            ValueError: It cannot be one; the sentence says why.
        """
        value = self._aliased(self._spelling(value) if isinstance(value, str) else value)
        if self.choices and isinstance(value, str) and value not in self.choices:
            raise ValueError(wrong_choice(value, self.choices))
        return self._checked(self._plain_type().check(value))

    def reason_for(self, text: str) -> str:
        """Why a value of another engine has the same effect as one of ours; empty for values of our own."""
        return self.declared.same_as.get(self._spelling(text), ("", ""))[1]

    def _spelling(self, text: str) -> str:
        """Words of a closed set may be written in capitals."""
        known = (
            *self.choices,
            *self.declared.same_as,
            *filter(lambda key: isinstance(key, str), self.declared.aliases),
        )
        is_word = self.declared.ignores_case or (text not in known and text.lower() in known)
        return text.lower() if is_word else text

    def _plain_type(self) -> ValueType:
        """The type with its suffixes."""
        has_suffixes = self.declared.suffixes
        return self.type._replace(has_suffixes=True) if has_suffixes else self.type

    def _aliased(self, value: object) -> Any:
        try:
            return self.declared.aliases.get(value, value)
        except TypeError:  # what cannot be a key is no alias
            return value

    def _checked(self, value: Any) -> Any:
        if value is None:
            return None
        for number in value if self.type.is_list else (value,):
            self._check_range(number)
        return value if self.declared.check is None else self.declared.check(value)

    def _check_range(self, value: Any) -> None:
        said = self.declared
        if self.type.base not in (int, float):
            return
        if self.type.base is int and not -_MAX_INTEGER <= value <= _MAX_INTEGER:  # other processes get 64 bits
            raise ValueError(f"must lie between -{_MAX_INTEGER} and {_MAX_INTEGER}")
        if problem := range_problem(said, value):
            raise ValueError(problem)


def key_flags(options: Iterable[Option]) -> Mapping[str, str]:
    """Flags of other engines to the dotted flag of ours that each stands for, such as `--hf-overrides.rope_theta`."""
    return {
        flag: f"{option.declared.flag}.{key}" for option in options for flag, key in option.declared.key_flags.items()
    }


_MAX_INTEGER = 2**63 - 1


@dataclass_transform(frozen_default=True)
def positional_group(cls: type[GroupT]) -> type[GroupT]:
    """`option_group` for a group whose fields are positional arguments, too."""
    return dataclass(init=False, repr=False, eq=False, frozen=True)(cls)


class OptionGroup:
    """Base of dataclasses whose fields are options; constructing one checks all of them.

    A group may inherit from several others, whose options it then has, and whose `conflicts` it reports.

    Raises:
        OptionsError: Values are out of range or contradict each other; the text has a line for each.
    """

    title: ClassVar[str] = ""
    error: ClassVar[type[OptionsError]] = OptionsError

    def __init__(self, *positional: Any, **values: Any) -> None:
        own = dataclasses.fields(self)  # type: ignore[arg-type]  # every group is a dataclass
        names = [entry.name for entry in own if not entry.kw_only]
        if len(positional) > len(names):
            raise TypeError(f"{type(self).__name__} takes at most {len(names)} positional arguments")
        given = dict(zip(names, positional, strict=False))
        for name in given.keys() & values.keys():
            raise TypeError(f"{type(self).__name__} got two values of {name!r}")
        given |= values
        for entry in own:
            value = given.pop(entry.name) if entry.name in given else _default(entry)
            if value is REQUIRED:
                raise TypeError(f"{type(self).__name__} is missing the argument {entry.name!r}")
            object.__setattr__(self, entry.name, value)
        for name in given:
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {name!r}")
        self.__post_init__()

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        own = dataclasses.fields(self)  # type: ignore[arg-type]  # every group is a dataclass
        shown = (f"{entry.name}={getattr(self, entry.name)!r}" for entry in own if entry.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __post_init__(self) -> None:
        faults: list[tuple[str, str]] = []
        for declared in options_of(type(self)):
            given = getattr(self, declared.name)
            if given is declared.default:  # in order as it is, and most values are
                continue
            try:
                value = declared.from_keyword(given)
            except ValueError as error:
                faults.append((declared.name, str(error)))
            else:
                object.__setattr__(self, declared.name, value)
        problems = values_problems(faults) or list(self.conflicts())
        if problems:
            raise self.error(*problems)

    def conflicts(self) -> Iterator[Problem]:
        """Problems of options that contradict each other. Groups extend it with `super()`."""
        yield from ()


_group_to_options: dict[type[Any], tuple[Option, ...]] = {}


def options_of(group: type[Any]) -> tuple[Option, ...]:
    """The options that the fields of a dataclass declare, its own before those of the groups it inherits from.

    Those of settings come before the options of the group that inherits them.
    """
    if group not in _group_to_options:
        _group_to_options[group] = _read_options(group)
    return _group_to_options[group]


_BUILTIN_TYPES: Mapping[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str, "int | None": int | None, "float | None": float | None,
    "str | None": str | None, "tuple[str, ...]": tuple[str, ...],
}  # fmt: skip
_annotation_to_type: dict[tuple[str, str], ValueType] = {}
"""Types by module and annotation: of hundreds of annotations a few dozen differ, and to read one takes 30 µs."""


def _annotated_type(owner: type[Any], name: str) -> ValueType:
    """The type of a field that `owner` declares."""
    text = vars(owner)["__annotations__"][name]
    key = ("" if text in _BUILTIN_TYPES else owner.__module__, text)
    if key not in _annotation_to_type:
        annotation = _BUILTIN_TYPES.get(text)
        if annotation is None:
            lone = type("", (), {"__module__": owner.__module__, "__annotations__": {"field": text}})
            annotation = typing.get_type_hints(lone)["field"]
        _annotation_to_type[key] = value_type(annotation)
    return _annotation_to_type[key]


def _read_options(group: type[Any]) -> tuple[Option, ...]:
    ancestors = reversed(group.__mro__)
    # Not `inspect.get_annotations`: importing it takes 5 ms of every `--help`.
    owners = {name: owner for owner in ancestors for name in vars(owner).get("__annotations__", ())}
    heirs = {owner: _heir_of(owner, group) for owner in set(owners.values())}
    order = {owner: index for index, owner in enumerate(group.__mro__)}

    def place(name: str) -> tuple[int, bool, int]:
        owner = owners[name]
        heir = heirs[owner]
        return order[heir], heir is owner, order[owner]

    declared = [(entry, said) for entry in dataclasses.fields(group) if (said := declaration_of(entry)) is not None]
    return tuple(
        _read_option(entry, said, owners[entry.name], heirs[owners[entry.name]])
        for entry, said in sorted(declared, key=lambda pair: place(pair[0].name))
    )


def _heir_of(owner: type[Any], group: type[Any]) -> type[Any]:
    """The class that says what the options of `owner` are about: itself, or the first that has inherited them."""
    return next((heir for heir in group.__mro__ if issubclass(heir, owner) and "title" in vars(heir)), owner)


def _read_option(entry: dataclasses.Field[Any], declared: Declaration, owner: type[Any], heir: type[Any]) -> Option:
    if declared.flag == OWN_NAME:
        declared = declared._replace(flag=f"--{entry.name.replace('_', '-')}")
    key = declared.flag.removeprefix("--").replace("-", "_") or entry.name
    variable = (ENVIRONMENT_PREFIX + key.upper(),) if declared.flag else ()
    return Option(
        name=entry.name,
        title=getattr(heir, "title", ""),
        type=_annotated_type(owner, entry.name),
        default=_default(entry),
        declared=declared,
        key=key,
        variables=(*variable, *declared.environment),
    )


def _default(entry: dataclasses.Field[Any]) -> Any:
    return entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
