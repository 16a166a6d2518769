"""Chat templates of published formats.

Repositories of these formats have code, or nothing, in place of a template.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from typing import Final

_FOLDER = os.path.join(os.path.dirname(__file__), "formats")  # a command line does without `pathlib`
PROMPT_FORMATS: Final = ("deepseek_v32", "deepseek_v4", "inkling", "tool_chat_template_gemma4")

# Inkling's tokenizer has this token without its name.
_OTHER_NAMES: Mapping[str, str] = {"<|content_xml|>": "<|unused_200024|>"}


def format_name(path: str) -> str | None:
    """The format that a path to a template is named after; None where it is none of `PROMPT_FORMATS`."""
    name, suffix = os.path.splitext(path.rpartition("/")[2])
    return name if suffix == ".jinja" and name in PROMPT_FORMATS else None


def format_text(name: str) -> str:
    """The template of one of `PROMPT_FORMATS`."""
    with open(os.path.join(_FOLDER, f"{name}.jinja"), encoding="utf-8") as file:
        return file.read()


def with_known_tokens(template: str, known: Container[str]) -> str:
    """A template with the control tokens that a tokenizer knows under another name."""
    for name, other in _OTHER_NAMES.items():
        if name in template and name not in known and other in known:
            template = template.replace(name, other)
    return template
