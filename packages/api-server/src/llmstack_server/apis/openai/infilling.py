"""Prompts of fill-in-the-middle models: text before and after a gap."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from llmstack_llm import request_errors
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.unsupported import unsupported

if TYPE_CHECKING:
    from llmstack_llm.text.tokenizer import Tokenizer

PREFIX: Final = "prefix"
SUFFIX: Final = "suffix"
# The parts of a prompt in the order of each family; the other words are special tokens.
_FORMS: Final[Sequence[Sequence[str]]] = (
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),  # Qwen coder, CodeGemma
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),  # StarCoder, Granite code
    ("<\uff5cfim\u2581begin\uff5c>", PREFIX, "<\uff5cfim\u2581hole\uff5c>", SUFFIX,
     "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek coder
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),  # Codestral
    ("\u2581<PRE>", PREFIX, "\u2581<SUF>", SUFFIX, "\u2581<MID>"),  # Code Llama
)  # fmt: skip


async def with_suffix(
    state: ServerState, prompts: Sequence[str | list[int]], suffix: str, *, add_special_tokens: bool
) -> list[list[int]]:
    """Each prompt with the text after the gap, as token ids in the form of the model.

    Raises:
        InvalidRequestError: The model has no tokens for this, or a text is too long.
    """
    tokenizer = await state.engine.get_tokenizer("suffix")
    form = next((form for form in _FORMS if _has_tokens(tokenizer, form)), None)
    if form is None:
        raise unsupported("suffix")
    # Those that the tokenizer puts before every text.
    first = await state.engine.tokenize("", add_special_tokens=True) if add_special_tokens else []
    after = await state.engine.tokenize(suffix, add_special_tokens=False, param="suffix")
    whole = []
    for index, prompt in enumerate(prompts):
        param = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
        if isinstance(prompt, str):
            prompt = await state.engine.tokenize(prompt, add_special_tokens=False, param=param)
        parts = {PREFIX: prompt, SUFFIX: after}
        whole.append(list(itertools.chain(first, *(parts.get(part) or _ids(tokenizer, part) for part in form))))
    return whole


def check_echo(suffix: str | None, echo: bool | None, *, has_source: bool) -> None:
    """Raises InvalidRequestError for an echo, which could only show the special tokens.

    `has_source`: The prompt goes to an encoder, so no answer continues it.
    """
    for name, value in (("suffix", suffix), ("echo", echo)):
        if has_source and value:
            reason = "the prompt goes to an encoder, and no answer continues it"
            raise request_errors.unsupported_parameter(name, reason)
    if suffix and echo:
        raise request_errors.invalid_value("suffix", "it cannot be combined with 'echo'")


def _has_tokens(tokenizer: Tokenizer, form: Sequence[str]) -> bool:
    return all(tokenizer.token_to_id(part) is not None for part in form if part not in (PREFIX, SUFFIX))


def _ids(tokenizer: Tokenizer, part: str) -> list[int]:
    token_id = tokenizer.token_to_id(part)
    return [] if token_id is None or part in (PREFIX, SUFFIX) else [token_id]
