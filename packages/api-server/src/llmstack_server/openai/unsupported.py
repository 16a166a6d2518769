"""Fields that are known and not available: a value that would change the answer is refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmstack_llm import request_errors
from llmstack_types import InvalidRequestError

Predicate = Callable[[Any], bool]


def one_of(*harmless: Any) -> Predicate:
    """True for null and for these very values; `True` is not 1 here."""
    return lambda value: value is None or any(type(value) is type(entry) and value == entry for entry in harmless)


_NEVER = one_of()

# Field to the values that mean what the server does anyway.
COMMON: Mapping[str, Predicate] = {
    "logprob_token_ids": one_of([]),
    "logits_processors": one_of([]),
    "kv_transfer_params": _NEVER,
    "lora_request": _NEVER,
    "thinking_token_budget": _NEVER,
    "repetition_detection": _NEVER,
}
COMPLETIONS: Mapping[str, Predicate] = {**COMMON, "prompt_embeds": one_of([]), "suffix": one_of("")}
CHAT: Mapping[str, Predicate] = {
    **COMMON,
    "functions": _NEVER,
    "function_call": one_of("none", "auto"),
    "audio": _NEVER,
    "modalities": one_of(["text"]),
    "prediction": _NEVER,
    "web_search_options": _NEVER,
    "mm_processor_kwargs": one_of({}),
    "prompt_embeds": one_of([]),
}


# Known fields that change nothing here, whatever their value: not worth counting as unknown.
IGNORED = frozenset(
    ("store", "metadata", "service_tier", "verbosity", "prompt_cache_key", "prompt_cache_retention",
     "safety_identifier", "session_id")
)  # fmt: skip


def check_unsupported(body: Mapping[str, Any], table: Mapping[str, Predicate]) -> None:
    """Refuses the first field of `body` that asks for something we do not have.

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
    """The refusal of one field."""
    reason = f"'{param}' is not supported by this server{_INSTEAD.get(param, '')}"
    return request_errors.unsupported_parameter(param, reason)
