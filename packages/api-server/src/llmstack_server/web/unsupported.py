"""Known fields: values that are not available are refused; some have no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmstack_llm import request_errors
from llmstack_types import InvalidRequestError

Predicate = Callable[[object], bool]


@dataclass(frozen=True)
class OneOf:
    """A predicate that is true for null and for these values; `True` does not equal 1."""

    values: tuple[object, ...]

    def __call__(self, value: object) -> bool:
        return value is None or any(type(value) is type(entry) and value == entry for entry in self.values)


@dataclass(frozen=True)
class WordOf:
    """A predicate that is true for null and for these words, and refuses others as invalid values of `param`."""

    param: str
    words: tuple[str, ...]

    def __call__(self, value: object) -> bool:
        check_word(self.param, value, self.words)
        return True


def one_of(*harmless: object) -> OneOf:
    """A predicate that is true for null and for these values."""
    return OneOf(harmless)


def word_of(param: str, *words: str) -> WordOf:
    """A predicate that is true for null and for these words."""
    return WordOf(param, words)


def check_word(param: str, value: object, words: tuple[str, ...]) -> None:
    """Checks a value that may be null.

    Raises:
        InvalidRequestError: It is none of the words (code `invalid_value`), or not a string.
    """
    if value is None or (isinstance(value, str) and value in words):
        return
    if not isinstance(value, str):
        raise request_errors.invalid_type(param, "a string", value)
    raise request_errors.invalid_value(param, f"expected one of {', '.join(words)}")


_NEVER = one_of()

# As OpenAI defines them.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")

# Of images, sound and video, and of the transfer of caches between servers.
MEDIA: Mapping[str, Predicate] = {
    "media_io_kwargs": one_of({}),
    "mm_processor_kwargs": one_of({}),
    "mm_payload": one_of("tensors", "none"),
    "return_mm_kwargs": one_of(False, True),
}

# Field to the values that have no effect.
COMMON: Mapping[str, Predicate] = {
    **MEDIA,
    "ec_transfer_params": _NEVER,
    "guided_decoding_backend": one_of(
        "auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"
    ),  # llguidance compiles all constraints
    "return_token_offsets": one_of(False),
    "return_weight_versions": one_of(False),
    "routed_experts_prompt_start": one_of(0),
    "service_tier": word_of("service_tier", *SERVICE_TIERS),
    "watermarking": one_of(False),
    "logits_processors": one_of([]),
    "kv_transfer_params": _NEVER,
    "lora_request": _NEVER,
}

_PREFIXES = "cached prefixes are found by their tokens alone"
_ACCOUNTS = "it is for the accounts of the operator of an API; limits here are per key"

IGNORED: Mapping[str, str] = {
    "max_tool_calls": "it limits tools that run at OpenAI, and functions run at the client",
    "metadata": "it describes stored answers, and only responses are stored",
    "kv_hints": "blocks are kept by what is learned of pauses; `session_final` gives them up",
    "prompt_cache_options": _PREFIXES,
    "prompt_cache_retention": "a prefix is kept while there is room, in memory and, with `--kv-cache-dir`, on disk",
    "safety_identifier": _ACCOUNTS,
    "service_tier": "there is one tier, and answers say `default`",
    "store": "chats and completions are never stored",
    "user": _ACCOUNTS,
    "verbosity": "no model served here has such a setting",
}
"""Known fields without effect, whatever their value, and why; they are not counted as unknown."""


def check_unsupported(body: Mapping[str, object], table: Mapping[str, Predicate]) -> None:
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
