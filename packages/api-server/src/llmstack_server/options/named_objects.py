"""Objects that a flag names, such as `--middleware module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from llmstack_server.options.errors import ServeError


def check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Each is `module:name` or `module.name`; nothing is imported, so a server can refuse others at once."""
    for name in names:
        _split(name)
    return names


def load_named(flag: str, name: str) -> Any:
    """The object at `module:name` or `module.name`; `check_names` has seen the name before.

    Raises:
        ServeError: There is none; the text names the flag and says why.
    """
    module_name, attribute = _split(name)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever the named module raises when it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ServeError(f"{flag} {name[:128]} cannot be loaded: {reason}", exit_code=2) from error


def _split(name: str) -> tuple[str, str]:
    module_name, colon, attribute = name.partition(":")
    if not colon:
        module_name, _, attribute = name.rpartition(".")
    if not module_name or not attribute:
        raise ValueError(f"{name[:128]!r} is not of the form module:name")
    return module_name, attribute
