"""Completions whose prompt is vectors in place of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from llmstack_llm import request_errors
from llmstack_server.apis.openai.protocol import CompletionRequest
from llmstack_server.web.sampling import parse_prompts

PARAM: Final = "prompt_embeds"
# What reads the tokens of the prompt, or sends them elsewhere.
_NEED_TOKENS: Final = ("echo", "suffix", "thinking_token_budget", "kv_transfer_params")

Prompt = str | list[int] | Mapping[str, object]
"""A prompt of a completion: text, token ids, or vectors."""


def prompts_of(fields: CompletionRequest, body: dict[str, object]) -> list[tuple[Prompt, str]]:
    """All prompts of a request, those of vectors first, each with its name in errors.

    The content of vectors is checked at admission.

    Raises:
        InvalidRequestError: There is none, one is of a wrong type, or another field asks for the tokens of vectors.
    """
    found: list[tuple[Prompt, str]] = []
    vectors, is_list = _vectors_of(fields.prompt_embeds)
    for index, value in enumerate(vectors):
        found.append(({PARAM: value}, f"{PARAM}[{index}]" if is_list else PARAM))
    if found:
        for name in _NEED_TOKENS:
            if getattr(fields, name):
                raise request_errors.invalid_value(name, f"it is not available with '{PARAM}'")
        if fields.prompt in (None, "", []):
            return found
    values, is_list = parse_prompts(fields.prompt, body)
    return found + [(value, f"prompt[{index}]" if is_list else "prompt") for index, value in enumerate(values)]


def _vectors_of(value: object) -> tuple[Sequence[str], bool]:
    """The files, and whether they came as a list; null and the empty array mean none."""
    if value is None:
        return [], False
    is_list = isinstance(value, list)
    files: list[str] = []
    for index, file in enumerate(value if isinstance(value, list) else [value]):
        if not isinstance(file, str):
            name = f"{PARAM}[{index}]" if is_list else PARAM
            raise request_errors.invalid_type(name, "a string in base64", file)
        files.append(file)
    return files, is_list
