"""The prompts of an offline call, which may be one or many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmstack_llm.input_processor import PromptInput


def prompt_list(prompts: Any) -> list[PromptInput]:
    """One prompt becomes a list of one; a list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [list(prompts)]
    return list(prompts)
