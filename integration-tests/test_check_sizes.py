"""Limits of files, classes, constructors and uses of `Any`."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "tools"))
    check_sizes: Any = importlib.import_module("check_sizes")

PATH = ROOT / "packages" / "bench" / "made_up.py"
CLASS = "packages/bench/made_up.py:Long"


def class_complaints(text: str) -> list[str]:
    return list(check_sizes.class_complaints(PATH, list(ast.walk(ast.parse(text)))))


def long_class(num_lines: int) -> str:
    return 'class Long:\n    """A docstring\n\n    of three lines."""\n' + "    x = 1\n" * (num_lines - 1)


def test_a_class_is_measured_without_its_docstring() -> None:
    assert class_complaints(long_class(250)) == []
    assert class_complaints(long_class(251)) == [f"{CLASS}: 251 lines, 250 at most"]


def test_a_constructor_is_measured_without_self() -> None:
    names = ", ".join(f"x{index}" for index in range(10))
    text = "class Long:\n    def __init__(self, {}) -> None: ...\n    def method(self, {}, y, z): ...\n"
    assert class_complaints(text.format(names, names)) == []
    assert class_complaints(text.format(f"{names}, *, y", "x")) == [f"{CLASS}.__init__: 11 arguments, 10 at most"]


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        (301, "301 lines, and 300 in LARGE of tools/check_sizes.py may only shrink"),
        (300, ""),
        (300 - check_sizes.SLACK, ""),
        (299 - check_sizes.SLACK, "lower its number in LARGE of tools/check_sizes.py from 300"),
        (250, "fit the limit of 250; remove it"),
    ],
)
def test_what_is_too_large_may_only_shrink(monkeypatch: pytest.MonkeyPatch, size: int, complaint: str) -> None:
    monkeypatch.setitem(check_sizes.LARGE, CLASS, 300)
    found = "".join(class_complaints(long_class(size)))
    assert complaint in found
    assert bool(found) is bool(complaint)


def test_a_package_may_not_say_any_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_sizes, "MAX_ANY", {"llm": 20})
    assert list(check_sizes.any_complaints({"llm": 20, "bench": 99})) == []
    assert list(check_sizes.any_complaints({"llm": 21})) == [
        "packages/llm: `Any` 21 times, 20 at most: say more by a type"
    ]
    assert "lower its number" in "".join(check_sizes.any_complaints({"llm": 9}))
