"""Refusals of constraints: one function per error code."""

from __future__ import annotations

from llmstack_types import InvalidRequestError

MAX_REASON_CHARS = 160


def invalid_json_schema(param: str, reason: str) -> InvalidRequestError:
    """A malformed schema, or an unsupported keyword."""
    return _refusal("Invalid schema", param, reason, "invalid_json_schema")


def schema_too_complex(param: str, reason: str) -> InvalidRequestError:
    """The schema is over a limit."""
    return _refusal("Schema too complex", param, reason, "schema_too_complex")


def invalid_regex(param: str, reason: str) -> InvalidRequestError:
    """A malformed pattern, or an unsupported construct."""
    return _refusal("Invalid regular expression", param, reason, "invalid_regex")


def invalid_grammar(param: str, reason: str) -> InvalidRequestError:
    """A malformed grammar, or an unsupported rule."""
    return _refusal("Invalid grammar", param, reason, "invalid_grammar")


def grammar_too_complex(param: str, reason: str) -> InvalidRequestError:
    """The pattern or grammar is over a limit."""
    return _refusal("Grammar too complex", param, reason, "grammar_too_complex")


def invalid_constraint(param: str, reason: str) -> InvalidRequestError:
    """A constraint of the wrong form."""
    return _refusal("Invalid value", param, reason, "invalid_value")


def not_available(reason: str) -> InvalidRequestError:
    """Fine elsewhere, not with this model."""
    return InvalidRequestError(f"Unsupported value: {reason}.", param="structured_outputs", code="unsupported_value")


def one_line(text: str) -> str:
    """The line of a library's message that says why, printable and bounded, without its full stop."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it cannot be compiled"]
    why = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    shown = "".join(char if char.isprintable() else " " for char in why[:MAX_REASON_CHARS])
    return shown.rstrip(".")


def _refusal(what: str, param: str, reason: str, code: str) -> InvalidRequestError:
    return InvalidRequestError(f"{what} in '{param}': {reason}.", param=param, code=code)
