"""Hooks of the documentation site: pages of the API reference, and links out of docs/.

The reference has a page per package. It shows what the package's `__init__` exports, and the modules of `MORE`.
"""

from __future__ import annotations

import ast
import logging
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
# Public names that no `__init__` exports, so that importing the package stays cheap.
MORE = {
    "llmstack_kernels": sorted(
        f"llmstack_kernels.{file.parent.name}.{file.parent.name}"
        for file in ROOT.glob("packages/kernels/src/llmstack_kernels/*/reference.py")
        if f"\ndef {file.parent.name}(" in (file.parent / "__init__.py").read_text(encoding="utf-8")
    ),
    "llmstack_model_runner": [
        "llmstack_model_runner.model_runner.ModelRunner",
        "llmstack_model_runner.models.CausalLM",
        "llmstack_model_runner.sampling.LogitsProcessor",
    ],
    "llmstack_server": ["llmstack_server.testing"],
    "llmstack_bench": ["llmstack_bench.client", "llmstack_bench.workload", "llmstack_bench.metrics"],
    "llmstack_command": ["llmstack_command.protocols"],
}
logger = logging.getLogger("mkdocs.hooks.site")  # below `mkdocs`, so that a warning fails a strict build


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of the API reference into the navigation, in place of `api/`."""
    pages = [{project_name(folder): api_page(folder)} for folder in FOLDERS]
    for section in config.nav or []:
        for entry in next(iter(section.values())):
            entry.update({title: pages for title, target in entry.items() if target == "api/"})
    return config


def project_name(folder: Path) -> str:
    """The distribution's name, such as `llmstack-llm`."""
    return str(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"])


def api_page(folder: Path) -> str:
    """The path of a package's page below docs/."""
    return f"api/{folder.name}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the API reference, which lie in no folder."""
    for folder in FOLDERS:
        files.append(File.generated(config, api_page(folder), content=reference_page(folder)))
    return files


def reference_page(folder: Path) -> str:
    """The page of one package: what its metadata says of it, then an entry per public name."""
    about = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    package = next(folder.glob("src/llmstack_*"))
    names = [*exported(package / "__init__.py"), *MORE.get(package.name, [])]
    lines = [f"::: {name}\n" for name in names]
    return "\n".join([f"# {about['name']}\n", f"{about['description']}\n", *lines, ""])


def exported(file: Path) -> list[str]:
    """Public paths of what a package exports: what its `__init__` defines or imports, in `if TYPE_CHECKING` too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmstack_"):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            names.append(node.name)
    return [f"{file.parent.name}.{name}" for name in sorted(set(names), key=str.lower)]


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Replaces links to files outside docs/ by their text; one to a file that does not exist is a warning."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def shown(match: re.Match[str]) -> str:
        text, target = match[1], match[2].split("#")[0]
        if not (folder / target).exists():
            logger.warning("%s: %s does not exist", page.file.src_uri, target)
        return f"{text} (`{(folder / target).resolve().relative_to(ROOT)}`)"

    return re.sub(r"\[([^]]*)\]\((\.\./[^)\s]+)\)", shown, markdown)
