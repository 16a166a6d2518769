"""Modules of custom code in the command line of another engine."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmstack_llm.options.resolve import Settings


def missing_modules(settings: Settings) -> Iterator[str]:
    """Modules of custom code that cannot be found; only their packages are looked for, and none is imported.

    As at the start, a module of the working folder is found only where Python's path has that folder.
    """
    for key in ("logits_processors", "middleware", "extra_routes"):
        for name in settings[key] or ():
            package = str(name).partition(":")[0].partition(".")[0]
            if not package.isidentifier() or find_spec(package) is None:
                flag = f"--{key.replace('_', '-')}"
                yield f"{flag}: there is no module '{package[:64]}' for {str(name)[:128]}"
