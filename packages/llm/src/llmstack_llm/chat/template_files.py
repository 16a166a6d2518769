"""Places of a model's chat templates, with their names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from llmstack_llm.text.prompt_formats import PROMPT_FORMATS, format_name, format_text
from llmstack_types import LLMStackError

logger = logging.getLogger(__name__)

MAX_TEMPLATE_CHARS = 2**20
_DEFAULT: Final = "default"
_TOOLS: Final = "tool_use"
_MAX_TEMPLATES = 64
_FOLDER = "additional_chat_templates"


class ChatTemplateError(LLMStackError, ValueError):
    """The template cannot be used at all; the text says why in one sentence."""


def find_chat_template(
    folder: Path | None, tokenizer_config: Mapping[str, object], *, override: str | None = None, has_tools: bool = False
) -> str | None:
    """The template's text: `override` (a name, a path or the template), or the model's for conversations of this kind.

    A name may be that of a format of `PROMPT_FORMATS`, and so may be the last part of a path where there is no file.

    Raises:
        ChatTemplateError: The override is none of the three, or there are several templates and no default.
    """
    if override is not None and ("{" in override or "\n" in override):
        return override
    named = _named_templates(folder, tokenizer_config)
    if override is not None:
        if override in named:
            return named[override]
        return format_text(override) if override in PROMPT_FORMATS else _read_path(override, named)
    found = (named.get(_TOOLS) if has_tools else None) or named.get(_DEFAULT)
    if found is None and named:
        raise ChatTemplateError(
            f"the model has several chat templates and none is named 'default'; choose one of {_listed(named)}"
        )
    return found


def _named_templates(folder: Path | None, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Name to text; `chat_template.jinja` replaces what the configuration has."""
    named = _configured(tokenizer_config.get("chat_template"))
    if folder is None:
        return named
    from llmstack_model_files import artifact_path, read_json

    if artifact_path(folder, "chat_template.jinja") is not None:
        named = {_DEFAULT: _read(folder, "chat_template.jinja")}
    if not named:
        named = _configured((read_json(folder, "chat_template.json", required=False) or {}).get("chat_template"))
    for path in sorted((folder / _FOLDER).glob("*.jinja"))[:_MAX_TEMPLATES]:
        named[path.stem] = _read(folder, f"{_FOLDER}/{path.name}")
    return named


def _configured(found: object) -> dict[str, str]:
    """One template, a list of named ones, or an object of them."""
    if isinstance(found, str):
        return {_DEFAULT: found}
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, Mapping)}
    items = list(found.items())[:_MAX_TEMPLATES] if isinstance(found, Mapping) else []
    return {name: text for name, text in items if isinstance(name, str) and isinstance(text, str)}


def _read(folder: Path, name: str) -> str:
    from llmstack_model_files import open_artifact

    with open_artifact(folder, name) as file:
        content = file.read(4 * MAX_TEMPLATE_CHARS)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"{name[:128]} is not text in UTF-8") from error


def _read_path(value: str, named: Mapping[str, str]) -> str:
    try:
        return Path(value).read_text(encoding="utf-8")
    except OSError:
        if name := format_name(value):
            logger.info("chat template: %s is no file here, so llmstack's own template of that name is used", value)
            return format_text(name)
        reason = f"no such file, none of the model's named templates ({_listed(named)}), and no template expression"
        raise ChatTemplateError(f"chat template: {reason}") from None


def _listed(named: Mapping[str, str]) -> str:
    return ", ".join(sorted(name[:64] for name in named)[:8]) or "there are none"
