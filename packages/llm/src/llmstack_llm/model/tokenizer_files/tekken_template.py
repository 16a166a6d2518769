"""The chat template of a tokenizer of Mistral, by mistral-common."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmstack_llm.model.tokenizer_files.source import ConversionError

_LIBRARY = "mistral-common"


def template_version() -> str | None:
    """The version of the library that makes templates; None where it is not installed."""
    try:
        return version(_LIBRARY)
    except PackageNotFoundError:
        return None


def tekken_template(path: Path) -> str | None:
    """A template for prompts with the tokens of mistral-common; None where the library is not installed.

    Raises:
        ConversionError: The library does not know the tokenizer's version.
    """
    if template_version() is None:
        return None
    try:
        from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template

        template: str = convert_tokenizer_to_chat_template(path)
    except Exception as error:  # of another library, about a file that is not ours
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConversionError(f"mistral-common makes no chat template for {path.name}: {reason}") from error
    return template
