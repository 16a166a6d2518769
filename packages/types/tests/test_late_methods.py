"""Dataclasses with methods that are compiled late are those of the library."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import pytest

from llmstack_types.late_methods import methods_compiled_late

OWN = vars(dataclasses).get("_create_fn")


def made() -> tuple[type[Any], type[Any], type[Any]]:
    """Three classes, which each call makes."""

    @dataclass(frozen=True, slots=True)
    class Frozen:
        number: int
        names: tuple[str, ...] = ()
        hidden: int = field(default=0, compare=False, repr=False)

    @dataclass(order=True)
    class Ordered:
        number: int

    @dataclass(frozen=True)
    class Child(Frozen):
        more: str = "x"

    return Frozen, Ordered, Child


@pytest.fixture
def both() -> list[tuple[type[Any], type[Any], type[Any]]]:
    """The classes of the library, and those with late methods."""
    with methods_compiled_late():
        late = made()
    return [made(), late]


def behaviour(frozen: type[Any], ordered: type[Any], child: type[Any]) -> list[object]:
    one, two = frozen(1, ("a",), 5), frozen(2)
    found: list[object] = [repr(one), repr(child(1)), one == frozen(1, ("a",), 6), one == two, one == 1, one != two]
    found += [hash(one) == hash(frozen(1, ("a",), 7)), {one: 3}[frozen(1, ("a",))], one == child(1, ("a",))]
    found += [ordered(1) < ordered(2), ordered(2) <= ordered(1), sorted([ordered(3), ordered(1)]), str(ordered)]
    for each, name in ((one, "number"), (one, "other"), (child(1), "more")):
        for act in (lambda each, name: setattr(each, name, 2), delattr):
            with pytest.raises((FrozenInstanceError, TypeError, AttributeError)) as caught:
                act(each, name)
            found.append(repr(caught.value))
    found += [dataclasses.replace(one, number=9), dataclasses.asdict(child(4)), str(inspect.signature(child))]
    return [str(each) for each in found]


def test_classes_behave_alike_with_the_first_call_and_later(both: list[Any]) -> None:
    own, late = both
    assert behaviour(*late) == behaviour(*own) == behaviour(*late)


@pytest.mark.skipif(OWN is None, reason="this Python compiles all methods of a class together")
def test_a_method_is_compiled_with_its_first_call_and_is_then_that_of_the_library(both: list[Any]) -> None:
    own, late = (classes[0] for classes in both)
    assert late.__init__.__code__.co_code == own.__init__.__code__.co_code
    for name, call in (("__hash__", hash), ("__eq__", lambda each: each == each)):
        assert getattr(late, name).__code__.co_code != getattr(own, name).__code__.co_code
        call(late(1))
        assert getattr(late, name).__code__.co_code == getattr(own, name).__code__.co_code
        assert getattr(late, name).__qualname__ == getattr(own, name).__qualname__
        assert inspect.signature(getattr(late, name)) == inspect.signature(getattr(own, name))


def test_blocks_may_be_nested_and_leave_the_library_as_it_was() -> None:
    @methods_compiled_late()
    def inner() -> Any:
        return made()[0]

    with methods_compiled_late():
        late = inner()
        assert late(1) == late(1)
        assert made()[0](1) != late(1)
    assert vars(dataclasses).get("_create_fn") is OWN


@dataclass(frozen=True, slots=True)
class Sent:
    """One that is pickled."""

    number: int


def test_pickles_are_read_by_classes_with_late_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(Sent(3))
    with methods_compiled_late():
        late: Any = dataclass(frozen=True, slots=True)(type("Sent", (), {"__annotations__": {"number": "int"}}))
    monkeypatch.setitem(globals(), "Sent", late)
    late.__module__ = __name__
    assert pickle.loads(sent) == late(3)
