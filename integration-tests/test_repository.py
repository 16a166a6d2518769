"""Facts about the tree that no tool checks: what each package folder holds, what it requires and what it says."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
OTHER_PEOPLES_NAMES = {"llmstack", "llmstack-cli"}
METADATA_ONLY = {"llmstack-command", "llmstack-bench", "llmstack-model-runner", "llmstack-demo-model"}


def project_of(folder: Path) -> dict[str, Any]:
    return dict(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def import_name_of(folder: Path) -> str:
    return next(path.name for path in folder.glob("src/llmstack_*"))


def requirements_of(folder: Path, *, with_extras: bool = False) -> list[Requirement]:
    project = project_of(folder)
    extras = project.get("optional-dependencies", {}).values() if with_extras else ()
    return [Requirement(text) for group in (project["dependencies"], *extras) for text in group]


def imported_siblings(folder: Path) -> set[str]:
    """Import names of the other packages that the sources of `folder` import anywhere."""
    names: set[str] = set()
    for path in folder.glob("src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return {name for name in names if name.startswith("llmstack_")} - {import_name_of(folder)}


SIBLING_TO_IMPORT = {project_of(folder)["name"]: import_name_of(folder) for folder in FOLDERS}

each_package = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@each_package
def test_a_package_has_what_every_package_has(folder: Path) -> None:
    expected = ["README.md", "CHANGELOG.md", f"src/{import_name_of(folder)}/py.typed"]
    assert [name for name in expected if not (folder / name).is_file()] == []
    assert list(folder.glob("tests/**/test_*.py"))
    assert list(folder.glob("benchmarks/bench_*.py"))


@each_package
def test_the_version_is_the_topmost_of_the_changelog(folder: Path) -> None:
    top = re.search(r"^## \[(\d[^\]]*)\]", (folder / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert top is not None
    assert top[1] == project_of(folder)["version"]


@each_package
def test_the_changelog_names_why_each_dependency_was_taken(folder: Path) -> None:
    changelog = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    names = {requirement.name for requirement in requirements_of(folder, with_extras=True)}
    assert {name for name in names if f"`{name}`" not in changelog} == set()


@each_package
def test_metadata_is_the_same_everywhere(folder: Path) -> None:
    project = project_of(folder)
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    assert "dynamic" not in project


@each_package
def test_requirements_are_our_names_in_ranges(folder: Path) -> None:
    requirements = requirements_of(folder, with_extras=True)
    assert OTHER_PEOPLES_NAMES.isdisjoint(requirement.name for requirement in requirements)
    ours = [requirement for requirement in requirements if requirement.name.startswith("llmstack-")]
    assert {requirement.name for requirement in ours} <= set(SIBLING_TO_IMPORT)
    assert {requirement.name for requirement in ours if requirement.specifier != SpecifierSet(">=0.1,<0.2")} == set()


@each_package
def test_a_package_imports_exactly_the_siblings_it_requires(folder: Path) -> None:
    required = {r.name for r in requirements_of(folder) if r.name.startswith("llmstack-")}
    if folder.name == "api-server":
        assert required >= METADATA_ONLY
        required -= METADATA_ONLY
    assert imported_siblings(folder) == {SIBLING_TO_IMPORT[name] for name in required}


@each_package
def test_every_module_opens_with_what_it_is_for(folder: Path) -> None:
    paths = [path for path in folder.glob("src/**/*.py") if path.stat().st_size]
    assert [path for path in paths if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None] == []


@each_package
def test_only_what_owns_a_process_configures_logging(folder: Path) -> None:
    pattern = re.compile(r"logging\.(basicConfig|config)|\.addHandler\(|getLogger\((?!__name__\))")
    found = {path for path in folder.glob("src/**/*.py") if pattern.search(path.read_text(encoding="utf-8"))}
    owners = {
        "api-server/src/llmstack_server/logs.py",
        "api-server/src/llmstack_server/api_worker.py",
        "engine-core/src/llmstack_engine_core/process.py",
    }
    assert found <= {ROOT / "packages" / owner for owner in owners}


def test_the_workspace_names_every_package_to_its_tools() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    import_names = set(SIBLING_TO_IMPORT.values())
    assert set(tool["importlinter"]["root_packages"]) == import_names
    assert set(tool["ruff"]["lint"]["isort"]["known-first-party"]) == import_names
    assert set(tool["mypy"]["mypy_path"]) == {f"packages/{folder.name}/src" for folder in FOLDERS} | {"tools"}
