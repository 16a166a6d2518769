"""Methods of dataclasses that are compiled when they are first called.

The library writes up to six methods of a class as text and compiles each. That was a fifth of the time in which a
process of a server imports its modules, and most of these methods are never called. Python 3.13 compiles them together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any, Final

_NAME: Final = "_create_fn"  # of the library; before Python 3.13


@contextmanager
def methods_compiled_late() -> Iterator[None]:
    """Dataclasses that are made in the `with` block, in any thread, compile `__init__` at once and the others late.

    They are the same methods then. `inspect.signature` of one that was never called shows no parameters of its own.
    Blocks may be nested, and the context decorates functions too.
    """
    own = vars(dataclasses).get(_NAME)
    if own is None or isinstance(own, partial):
        yield
        return
    setattr(dataclasses, _NAME, partial(_create_late, own))
    try:
        yield
    finally:
        setattr(dataclasses, _NAME, own)


def _create_late(create: Callable[..., FunctionType], name: str, *text: Any, **context: Any) -> FunctionType:
    """A function that becomes the one that `create` makes of the text; `__init__` at once, since classes show it."""
    if name == "__init__":
        return create(name, *text, **context)

    @cache
    def make() -> FunctionType:
        made = create(name, *text, **context)
        if made.__closure__ is None:  # that of others cannot be put in place: those of frozen classes, which raise
            late.__code__, late.__kwdefaults__ = made.__code__, None
        return made

    late = FunctionType(_call.__code__, context["globals"], name)
    late.__kwdefaults__ = {"make": make}
    return late


def _call(*arguments: Any, make: Callable[[], FunctionType]) -> Any:
    return make()(*arguments)
