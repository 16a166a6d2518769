"""One line of the doctor's report, and the packages that are asked for it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The doctor's finding about one thing.

    Attributes:
        state: A `problem` prevents serving; a `note` limits it, or says what could be better.
        remedy: What to do about it; empty where there is nothing to do.
    """

    name: str
    state: State
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """The form of the JSON report."""
        return {"name": self.name, "state": self.state, "text": self.text, "remedy": self.remedy}


def from_sentence(name: str, state: State, sentence: str) -> Finding:
    """The finding of a sentence of the form `cause; remedy`, which is that of the stack's own errors."""
    cause, _, remedy = sentence.rstrip(".").partition("; ")
    return Finding(name, state, cause, remedy)


def guarded(name: str, find: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of `find`; where it fails, the reason is the finding."""
    try:
        return list(find())
    except Exception as error:  # noqa: BLE001 - a broken installation raises anything, and is what the report is for
        lines = str(error).strip().splitlines() or [""]
        return [Finding(name, "problem", f"cannot be checked: {type(error).__name__}: {lines[-1][:200]}")]


def package_module(name: str) -> Any | None:
    """A module of another package of the stack, found by name; None where the package is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        return None
    return importlib.import_module(name)


def module_of_file(package: str, file: str) -> Any | None:
    """A module that imports nothing of its package, loaded from its file alone; None without the package.

    The package itself may import PyTorch, which takes seconds.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    name = f"{package}_{file.removesuffix('.py')}_alone"
    spec = importlib.util.spec_from_file_location(name, Path(found.origin).parent / file)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
