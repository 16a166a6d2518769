"""Completions whose prompt is vectors in place of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from llmstack_llm import request_errors
from llmstack_server.apis.openai.protocol import CompletionRequest

PARAM: Final = "prompt_embeds"
# What reads the tokens of the prompt, or sends them elsewhere.
_NEED_TOKENS: Final = ("echo", "suffix", "thinking_token_budget", "kv_transfer_params")


def has_vectors(body: Mapping[str, Any]) -> bool:
    """Whether a request has vectors; null and the empty array mean none."""
    return body.get(PARAM) not in (None, [])


def vectors_of(fields: CompletionRequest) -> Mapping[str, str]:
    """The prompt of a request that has vectors; their content is checked at admission.

    Raises:
        InvalidRequestError: They are no string, or another field asks for tokens.
    """
    if not isinstance(fields.prompt_embeds, str):
        raise request_errors.invalid_type(PARAM, "a string in base64", fields.prompt_embeds)
    if fields.prompt not in (None, "", []):
        raise request_errors.invalid_value(PARAM, "a request has either 'prompt' or 'prompt_embeds'")
    for name in _NEED_TOKENS:
        if getattr(fields, name):
            raise request_errors.invalid_value(name, f"it is not available with '{PARAM}'")
    return {PARAM: fields.prompt_embeds}
