"""Facts of a field beside its type and default, such as its range."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
_KEY: Final = "facts"


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """The declaration of a field, from which checks, encodings and documents are derived.

    Attributes:
        minimum: The least number that it may have; None where it is no number, or its range is not fixed.
        maximum: The largest one.
        excludes_minimum: Whether it must be above the minimum.
        given_by: The requests over HTTP that give it under its name: all that generate, those of completions and
            chats, or none.
        help: What it means, where its name does not say that.
        is_recorded: Whether step logs record it: decisions depend on it, and it holds no text of a user.
        is_sent: Whether engine cores read it.
        is_for_host: Whether the host must choose the tokens of a request with another value than the default.
    """

    minimum: float | None = None
    maximum: float | None = None
    excludes_minimum: bool = False
    given_by: Literal["all", "answers", "none"] = "all"
    help: str | None = None
    is_recorded: bool = True
    is_sent: bool = True
    is_for_host: bool = False


NO_FACTS: Final = FieldFacts(given_by="none")


def declared(
    default: Any,
    minimum: float | None = None,
    maximum: float | None = None,
    *,
    excludes_minimum: bool = False,
    given_by: Literal["all", "answers", "none"] = "all",
    help: str | None = None,
    is_recorded: bool = True,
    is_sent: bool = True,
    is_for_host: bool = False,
) -> Any:
    """A field of a dataclass with its default and its `FieldFacts`."""
    facts = FieldFacts(minimum, maximum, excludes_minimum, given_by, help, is_recorded, is_sent, is_for_host)
    return dataclasses.field(default=default, metadata={_KEY: facts})


def facts_of(cls: type) -> Mapping[str, FieldFacts]:
    """The facts of the fields of a dataclass, by name in order; `NO_FACTS` of those that declare none."""
    return {field.name: field.metadata.get(_KEY, NO_FACTS) for field in dataclasses.fields(cls)}
