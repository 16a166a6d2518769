"""Commands of the documentation, for the tests that run them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def commands_of(page: str, section: str | None = None) -> list[list[str]]:
    """The words of each line of the page's blocks without a language, or of those under one heading, less variables."""
    text = (DOCS / page).read_text()
    if section is not None:
        level, _, text = re.split(rf"^(#+) ({re.escape(section)})$", text, maxsplit=1, flags=re.MULTILINE)[1:]
        text = re.split(rf"^#{{2,{len(level)}}} ", text, maxsplit=1, flags=re.MULTILINE)[0]
    blocks = [
        block
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if not language
    ]
    words = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [line[next(i for i, word in enumerate(line) if not re.match(r"[A-Z_]+=", word)) :] for line in words if line]


def options_of(page: str, section: str, number: int, values: dict[str, str]) -> list[str]:
    """The options of the n-th `llmstack serve MODEL` of a section, with other values for some that it has."""
    serves = [line for line in commands_of(page, section) if line[:3] == ["llmstack", "serve", "MODEL"]]
    options = serves[number][3:]
    for flag, value in values.items():
        options[options.index(flag) + 1] = value
    return options
