"""Prompts of fill-in-the-middle models: text before and after a gap."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from llmstack_llm import request_errors
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.unsupported import unsupported

if TYPE_CHECKING:
    from llmstack_llm.text.tokenizer import Tokenizer

PREFIX: Final = "prefix"
SUFFIX: Final = "suffix"
MAX_SUFFIX_CHARS: Final = 1 << 24
"""Of all prompts together, each of which has a suffix of its own: a token takes 8 bytes."""


class GapForm(NamedTuple):
    """The form of a prompt with a gap, as one family of models was trained with it.

    Attributes:
        parts: The texts in their order; the other words are special tokens.
        repository: The token before the name of a repository, or nothing.
        file: The token before the name of each of its files, or nothing.
        ends: Further tokens that models of the family say behind a filled gap, as far as a model has them.
    """

    parts: Sequence[str]
    repository: str = ""
    file: str = ""
    ends: Sequence[str] = ()


_FORMS: Final[Sequence[GapForm]] = (
    GapForm(("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
            "<|repo_name|>", "<|file_sep|>",
            ("<|fim_pad|>", "<|file_separator|>")),  # Qwen coder; CodeGemma without files
    GapForm(("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),
            "<repo_name>", "<file_sep>", ("<fim_pad>",)),  # StarCoder 2; StarCoder and Granite code without files
    GapForm(("<\uff5cfim\u2581begin\uff5c>", PREFIX, "<\uff5cfim\u2581hole\uff5c>", SUFFIX,
             "<\uff5cfim\u2581end\uff5c>")),  # DeepSeek coder
    GapForm(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),  # Codestral
    GapForm(("\u2581<PRE>", PREFIX, "\u2581<SUF>", SUFFIX, "\u2581<MID>"), ends=("\u2581<EOT>",)),  # Code Llama
)  # fmt: skip


def form_of(tokenizer: Tokenizer) -> GapForm | None:
    """The form whose tokens the model has, with its tokens of files if it has both; None for no such model."""
    for form in _FORMS:
        if _has_tokens(tokenizer, form.parts):
            has_files = bool(form.file) and _has_tokens(tokenizer, (form.repository, form.file))
            return form if has_files else form._replace(repository="", file="")
    return None


async def with_suffix(
    state: ServerState, prompts: Sequence[str | list[int]], suffix: str, *, add_special_tokens: bool
) -> list[list[int]]:
    """Each prompt with the text after the gap, as token ids in the form of the model.

    Raises:
        InvalidRequestError: The model has no tokens for this, or a text is too long.
    """
    tokenizer = await state.engine.get_tokenizer("suffix")
    form = form_of(tokenizer)
    if form is None:
        raise unsupported("suffix")
    num_chars = len(suffix) * len(prompts)
    if num_chars > MAX_SUFFIX_CHARS:
        raise request_errors.too_much_text("suffix", MAX_SUFFIX_CHARS, num_chars)
    # Those that the tokenizer puts before every text.
    first = await state.engine.tokenize("", add_special_tokens=True) if add_special_tokens else []
    after = await state.engine.tokenize(suffix, add_special_tokens=False, param="suffix")
    whole = []
    for index, prompt in enumerate(prompts):
        param = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
        if isinstance(prompt, str):
            prompt = await state.engine.tokenize(prompt, add_special_tokens=False, param=param)
        whole.append([*first, *gap_ids(tokenizer, form, prompt, after)])
    return whole


def gap_ids(tokenizer: Tokenizer, form: GapForm, before: Sequence[int], after: Sequence[int]) -> list[int]:
    """The tokens before and after a gap in the form of the model."""
    texts = {PREFIX: before, SUFFIX: after}
    return list(itertools.chain.from_iterable(texts.get(part) or _ids(tokenizer, part) for part in form.parts))


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


def _has_tokens(tokenizer: Tokenizer, parts: Sequence[str]) -> bool:
    return all(tokenizer.token_to_id(part) is not None for part in parts if part not in (PREFIX, SUFFIX))


def _ids(tokenizer: Tokenizer, part: str) -> list[int]:
    token_id = tokenizer.token_to_id(part)
    return [] if token_id is None or part in (PREFIX, SUFFIX) else [token_id]
