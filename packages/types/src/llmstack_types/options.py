"""Declaration of options as fields: flag, range and help."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, dataclass_transform

REQUIRED: Any = dataclasses.MISSING
SAME_DEFAULT: Any = object()
"""The default of commands is that of the keyword."""
OWN_NAME = "--"
"""Stands for the flag that has the name of the field."""
_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_METADATA_KEY = "llmstack option"

GroupT = TypeVar("GroupT")


class Declaration(NamedTuple):
    """The declaration of a field's option besides type and default; see `option`."""

    help: str
    flag: str = OWN_NAME
    short: str = ""
    also: tuple[str, ...] = ()
    positional: str = ""
    metavar: str = ""
    value_without_text: str | None = None
    sets: bool = True
    command_default: Any = SAME_DEFAULT
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    suffixes: bool = False
    ignores_case: bool = False
    aliases: Mapping[Any, Any] = _NOTHING
    read: Callable[[str], Any] | None = None
    check: Callable[[Any], Any] | None = None
    environment: tuple[str, ...] = ()
    replaces: Mapping[str, tuple[str, ...]] = _NOTHING
    key_flags: Mapping[str, str] = _NOTHING
    same_as: Mapping[str, tuple[str, str]] = _NOTHING
    example: str = ""
    show: Callable[[Any], str] | None = None
    secret: bool = False


def option(default: Any = REQUIRED, *, help: str, **details: Any) -> Any:
    """Declares an option: the value of a dataclass field of an option group, or of settings.

    `flag`: Its name on a command line, where that is not `--block-size` for a field `block_size`; an option whose flag
      is empty is a keyword only. The key in files is the same without dashes, the variable is `LLMSTACK_BLOCK_SIZE`. A
      switch also gets its `--no-` form.
    `short`, `also`: Further flags.
    `positional`: The word of the command line that sets it, too.
    `metavar`: The word for its value in help, where `N` of integers or `JSON` of objects does not say enough.
    `value_without_text`: The value of the flag where none follows.
    `sets`: The value that a switch sets: False for flags such as `--disable-x` of a field that says `has_x`.
    `command_default`: The default of commands, where it is another one than that of the keyword.
    `at_least`, `at_most`, `above`: The range of numbers, and of each in a list.
    `ignores_case`: Choices may be written in capitals.
    `suffixes`: Integers may end with a unit, such as `4k` or `4K`.
    `aliases`: Values to what they mean.
    `read`: Reads a text, where it is not written as its type is; raises ValueError with a sentence.
    `check`: Returns the value, or a normal form of it; raises ValueError with a sentence.
    `environment`: Further variables, after the option's own.
    `replaces`: Flags of other engines, which are refused with the advice to use this one, and the values that are not.
    `key_flags`: Flags of other engines to the key of this JSON object that each sets.
    `same_as`: Values of other engines to the value that has the same effect here, and the reason, for the log.
    `example`: A value, for help and advice.
    `show`: Writes a value as it is read, where that is not how its type is written.
    `secret`: Never shown.
    """
    metadata = {_METADATA_KEY: Declaration(help, **details)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def declaration_of(entry: dataclasses.Field[Any]) -> Declaration | None:
    """The declaration of a field; None for a field that is no option."""
    found: Declaration | None = entry.metadata.get(_METADATA_KEY)
    return found


@dataclass_transform(kw_only_default=True, frozen_default=True)
def option_group(cls: type[GroupT]) -> type[GroupT]:
    """A frozen dataclass of options, which configurations and other groups inherit.

    It has no constructor: `OptionGroup` in `llmstack_llm` has one, and so has the dataclass of a configuration. Methods
    that `dataclass` makes take half a millisecond of every start, for each class.
    """
    return dataclass(kw_only=True, init=False, repr=False, eq=False, frozen=True)(cls)


def range_problem(said: Declaration, value: float) -> str:
    """Why a number is outside of its range; empty where it is not."""
    is_inside = (
        (said.at_least is None or value >= said.at_least)
        and (said.above is None or value > said.above)
        and (said.at_most is None or value <= said.at_most)
        and math.isfinite(value)
    )
    return "" if is_inside else f"must be {range_text(said)}, but is {value}"


def check_ranges(config: Any) -> None:
    """Checks the options among the fields of a configuration that are numbers.

    Raises:
        ValueError: One is no integer, or out of its range; the text names it.
    """
    for entry in dataclasses.fields(config):
        said, value = declaration_of(entry), getattr(config, entry.name)
        kind = _NUMBERS.get(str(entry.type).removesuffix(_OR_NONE))
        if said is None or kind is None or (value is None and str(entry.type).endswith(_OR_NONE)):
            continue
        if not hasattr(value, "__index__" if kind == "an integer" else "__float__"):
            raise ValueError(f"{entry.name} must be {kind}, but is {value!r}")
        if problem := range_problem(said, value):
            raise ValueError(f"{entry.name} {problem}")


_NUMBERS: Mapping[str, str] = {"int": "an integer", "float": "a number"}
_OR_NONE = " | None"


def range_text(said: Declaration) -> str:
    """The range of an option's numbers in words."""
    parts = [] if said.at_least is None else [f"at least {said.at_least}"]
    parts += [] if said.above is None else [f"above {said.above}"]
    parts += [] if said.at_most is None else [f"at most {said.at_most}"]
    return " and ".join(parts) or "finite"
