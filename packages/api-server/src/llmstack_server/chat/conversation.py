"""What a chat asks for, whichever API it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and how they are to be answered, in the forms of OpenAI's chat API; unchecked.

    Attributes:
        add_generation_prompt: Whether the prompt ends where an assistant's message begins.
        continue_final_message: Whether the answer continues the last message instead.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
