"""Encoding of `StructuredOutputsParams`: one positional row."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final

from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_types import StructuredOutputsParams

MAX_CHOICES: Final = 4096

_TEXT = fields.optional(fields.text())
_TEXTS = fields.texts(max_items=MAX_CHOICES)


def _choice(value: Any, name: str) -> tuple[str, ...] | None:
    return None if value is None else tuple(_TEXTS(value, name))


# One check per field, in the order of the class.
_CHECKS: Final[dict[str, fields.Check]] = {
    "json": _TEXT,
    "regex": _TEXT,
    "choice": _choice,
    "grammar": _TEXT,
    "json_object": fields.optional(fields.boolean),
    "structural_tag": _TEXT,
    "disable_any_whitespace": fields.boolean,
    "whitespace_pattern": _TEXT,
    "disable_additional_properties": fields.optional(fields.boolean),
}
_GET_FIELDS: Final = attrgetter(*_CHECKS)


def encode_structured_outputs(params: StructuredOutputsParams) -> list[Any]:
    """The fields in the order of the class.

    Raises:
        CodecError: A schema is no text yet, which admission makes of it.
    """
    for name in ("json", "structural_tag"):
        if not isinstance(getattr(params, name), str | None):
            raise CodecError(f"structured_outputs.{name} must be a text")
    values = list(_GET_FIELDS(params))
    return [list(value) if isinstance(value, tuple) else value for value in values]


def decode_structured_outputs(value: Any, name: str) -> StructuredOutputsParams:
    """The inverse of `encode_structured_outputs`."""
    values = fields.row(value, name, len(_CHECKS))
    checked = [check(item, f"{name}.{key}") for (key, check), item in zip(_CHECKS.items(), values, strict=True)]
    return StructuredOutputsParams(*checked)
