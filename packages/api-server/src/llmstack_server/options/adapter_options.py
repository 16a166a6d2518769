"""Options of the LoRA adapters that a server knows by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from llmstack_llm.options.option import OptionGroup
from llmstack_types.options import option, option_group

_FIELDS = frozenset({"name", "path", "base_model_name"})


class AdapterModule(NamedTuple):
    """An adapter to serve from the start."""

    name: str
    path: str
    base_model_name: str | None = None


def check_modules(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Each is `name=path`, or a JSON object, and no name comes twice."""
    names = [read_module(text).name for text in texts]
    if len(set(names)) != len(names):
        raise ValueError("a name is given twice")
    return texts


def read_module(text: str) -> AdapterModule:
    """The adapter that `name=path`, or `{"name": ..., "path": ..., "base_model_name": ...}`, describes.

    Raises:
        ValueError: It has another form.
    """
    if not text.startswith("{"):
        name, _, path = text.partition("=")
        if not (name and path):
            raise ValueError(f"{text[:64]!r} is neither name=path nor a JSON object with name and path")
        return AdapterModule(name, path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{text[:64]!r} is not valid JSON") from None
    if not _FIELDS.issuperset(values) or not all(isinstance(value, str) for value in values.values()):
        raise ValueError(f"{text[:64]!r} may have only the texts name, path and base_model_name")
    if not (values.get("name") and values.get("path")):
        raise ValueError(f"{text[:64]!r} has no name or no path")
    return AdapterModule(values["name"], values["path"], values.get("base_model_name"))


def start_modules(texts: tuple[str, ...], media: Mapping[str, str] | None) -> list[tuple[str, AdapterModule]]:
    """Adapters of the start, each with its flag: those by name, and those for kinds of items."""
    named = [("--lora-modules", read_module(text)) for text in texts]
    return named + [("--default-mm-loras", AdapterModule(kind, path)) for kind, path in (media or {}).items()]


@option_group
class AdapterNames(OptionGroup):
    """Adapters from the start, and where clients may load others from."""

    title = "LoRA adapters"

    modules: tuple[str, ...] = option(
        (),
        flag="--lora-modules",
        check=check_modules,
        metavar="NAME=PATH",
        help="adapters to serve: name=path, or JSON with name, path and base_model_name",
        example='{"name": "style", "path": "/adapters/style", "base_model_name": "gpt2"}',
    )
    root: str | None = option(
        None,
        flag="--lora-root",
        metavar="DIR",
        help="folder from which operators load adapters at run time (default: none, there are no such routes)",
    )

    def start_modules(self) -> list[AdapterModule]:
        """The adapters from the start, by name."""
        return [read_module(text) for text in self.modules]
