"""Known fields that are not available: values with an effect are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmstack_llm import request_errors
from llmstack_types import InvalidRequestError

Predicate = Callable[[Any], bool]


def one_of(*harmless: Any) -> Predicate:
    """A predicate that is true for null and for these values; `True` does not equal 1."""
    return lambda value: value is None or any(type(value) is type(entry) and value == entry for entry in harmless)


_NEVER = one_of()

# Field to the values that have no effect.
COMMON: Mapping[str, Predicate] = {
    "logprob_token_ids": one_of([]),
    "logits_processors": one_of([]),
    "kv_transfer_params": _NEVER,
    "lora_request": _NEVER,
    "thinking_token_budget": _NEVER,
    "repetition_detection": _NEVER,
}

# Known fields without effect, whatever their value; they are not counted as unknown.
IGNORED = frozenset(
    ("store", "metadata", "service_tier", "verbosity", "prompt_cache_key", "prompt_cache_retention",
     "safety_identifier", "session_id")
)  # fmt: skip


def check_unsupported(body: Mapping[str, Any], table: Mapping[str, Predicate]) -> None:
    """Refuses the first field of `body` whose value is not available.

    Raises:
        InvalidRequestError: Code `unsupported_parameter`.
    """
    for field, value in body.items():
        is_harmless = table.get(field)
        if is_harmless is not None and not is_harmless(value):
            raise unsupported(field)


# What to use in place of a field.
_INSTEAD = {"functions": "; use 'tools'", "function_call": "; use 'tool_choice'"}


def unsupported(param: str) -> InvalidRequestError:
    """The error for a field that is not supported."""
    reason = f"'{param}' is not supported by this server{_INSTEAD.get(param, '')}"
    return request_errors.unsupported_parameter(param, reason)
