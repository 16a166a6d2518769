"""Facts about the tree that no tool checks: what each package folder holds, what it requires and what it says."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
OTHER_PEOPLES_NAMES = {"llmstack", "llmstack-cli"}
METADATA_ONLY = {
    "llmstack-command", "llmstack-bench", "llmstack-model-runner", "llmstack-parallel", "llmstack-demo-model",
}  # fmt: skip


def project_of(folder: Path) -> dict[str, Any]:
    return dict(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def import_name_of(folder: Path) -> str:
    return next(path.name for path in folder.glob("src/llmstack_*"))


def requirements_of(folder: Path, *, with_extras: bool = False) -> list[Requirement]:
    project = project_of(folder)
    extras = project.get("optional-dependencies", {}).values() if with_extras else ()
    return [Requirement(text) for group in (project["dependencies"], *extras) for text in group]


def imported_siblings(folder: Path, *patterns: str) -> set[str]:
    """Import names of the other packages that files of `folder` import anywhere; by default, its sources."""
    names: set[str] = set()
    for path in [path for pattern in patterns or ("src/**/*.py",) for path in folder.glob(pattern)]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return {name for name in names if name.startswith("llmstack_")} - {import_name_of(folder)}


def packages_below(folder: Path) -> set[str]:
    """Import names of what the package requires, directly or through another, extras included."""
    names: set[str] = set()
    pending = [folder]
    while pending:
        for requirement in requirements_of(pending.pop(), with_extras=True):
            name = SIBLING_TO_IMPORT.get(requirement.name)
            if name is not None and name not in names:
                names.add(name)
                pending.append(IMPORT_TO_FOLDER[name])
    return names


def packages_above(folder: Path) -> set[str]:
    """Import names of the packages that require this one, and of those that the layers put above it."""
    name = import_name_of(folder)
    names = {import_name_of(other) for other in FOLDERS if name in packages_below(other)}
    ranks = {part.strip(): rank for rank, layer in enumerate(layers()) for part in layer.split("|")}
    if name in ranks:
        names |= {other for other, rank in ranks.items() if rank < ranks[name]}
    else:  # the command, the benchmarks and the demo model are in no layer: all that they do not require is above
        names |= set(ranks)
    return names - packages_below(folder) - {name}


def layers() -> list[str]:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = tool["importlinter"]["contracts"]
    return next(list(contract["layers"]) for contract in contracts if contract["id"] == "layers")


def sets_of_words(text: str) -> set[frozenset[str]]:
    """Tuples, lists, sets and `Literal` types of three or more words that a source writes out, in lower case."""
    return {
        frozenset(str(ast.literal_eval(word)).lower() for word in node.elts)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and len(node.elts) >= 3
        and all(isinstance(word, ast.Constant) and isinstance(word.value, str) for word in node.elts)
    }


IMPORT_TO_FOLDER = {import_name_of(folder): folder for folder in FOLDERS}
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
    assert {requirement.name for requirement in ours if requirement.specifier != SpecifierSet(">=0.2,<0.3")} == set()


@each_package
def test_a_package_imports_exactly_the_siblings_it_requires(folder: Path) -> None:
    required = {r.name for r in requirements_of(folder) if r.name.startswith("llmstack-")}
    if folder.name == "api-server":
        assert required >= METADATA_ONLY
        required -= METADATA_ONLY
    assert imported_siblings(folder) == {SIBLING_TO_IMPORT[name] for name in required}


@each_package
def test_benchmarks_and_tests_import_nothing_above_their_package(folder: Path) -> None:
    imported = imported_siblings(folder, "benchmarks/**/*.py", "tests/**/*.py", "train/**/*.py")
    assert imported & packages_above(folder) == set()


def test_the_packages_above_a_leaf_are_those_that_use_it() -> None:
    above_the_kernels = packages_above(ROOT / "packages" / "kernels")
    assert above_the_kernels >= {"llmstack_model_runner", "llmstack_engine_core", "llmstack_llm", "llmstack_server"}
    assert above_the_kernels.isdisjoint({"llmstack_types", "llmstack_kv_cache"})
    assert packages_above(ROOT / "packages" / "bench") >= {"llmstack_server", "llmstack_model_runner"}


def test_each_name_of_the_types_is_exchanged_by_two_packages() -> None:
    """Of a package's own is what no other one names, unless it is a field of something that is exchanged."""
    types = ROOT / "packages" / "types"
    users: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in folder.glob("src/**/*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmstack_types"):
                    for alias in node.names:
                        users.setdefault(alias.name, set()).add(folder.name)
    sources = [path.read_text(encoding="utf-8") for path in types.glob("src/**/*.py")]
    fields = {
        name.id
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AnnAssign)
        for name in ast.walk(node.annotation)
        if isinstance(name, ast.Name)
    }
    names = importlib.import_module("llmstack_types").__all__
    assert {name: users.get(name) for name in names if len(users.get(name, ())) < 2 and name not in fields} == {}


@each_package
def test_every_module_opens_with_what_it_is_for(folder: Path) -> None:
    paths = [path for path in folder.glob("src/**/*.py") if path.stat().st_size]
    assert [path for path in paths if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None] == []


def test_no_two_packages_write_out_the_same_set_of_words() -> None:
    packages: dict[frozenset[str], set[str]] = {}
    for folder in FOLDERS:
        for path in folder.glob("src/**/*.py"):
            for words in sets_of_words(path.read_text(encoding="utf-8")):
                packages.setdefault(words, set()).add(folder.name)
    assert frozenset({"int8", "int4", "fp8"}) in packages
    assert {tuple(sorted(words)): names for words, names in packages.items() if len(names) > 1} == {}


@pytest.mark.parametrize(
    "text", ['("a", "b", "c")', '["A", "B", "C"]', 'frozenset({"c", "b", "a"})', 'Literal["a", "b", "c"]']
)
def test_a_set_of_words_is_the_same_in_any_form(text: str) -> None:
    assert sets_of_words(f"from typing import Literal\nWORDS = {text}\n") == {frozenset("abc")}


def test_two_words_or_values_that_are_no_words_are_not_a_set_of_words() -> None:
    assert sets_of_words('A = ("a", "b")\nB = ("a", "b", 1)\nC = {"a": 1, "b": 2, "c": 3}\n') == set()


@each_package
def test_only_what_owns_a_process_configures_logging(folder: Path) -> None:
    pattern = re.compile(r"logging\.(basicConfig|config)|\.addHandler\(|getLogger\((?!__name__\))")
    found = {path for path in folder.glob("src/**/*.py") if pattern.search(path.read_text(encoding="utf-8"))}
    owners = {
        "api-server/src/llmstack_server/observability/logs.py",
        "api-server/src/llmstack_server/serving/api_worker.py",
        "engine-core/src/llmstack_engine_core/process.py",
        "parallel/src/llmstack_parallel/rank.py",
        "parallel/src/llmstack_parallel/ray_host.py",
        "types/src/llmstack_types/log_lines.py",  # one operation sets the level in each of these processes
    }
    assert found <= {ROOT / "packages" / owner for owner in owners}


def test_the_workspace_names_every_package_to_its_tools() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    import_names = set(SIBLING_TO_IMPORT.values())
    assert set(tool["importlinter"]["root_packages"]) == import_names
    assert set(tool["ruff"]["lint"]["isort"]["known-first-party"]) == import_names
    assert set(tool["mypy"]["mypy_path"]) == {f"packages/{folder.name}/src" for folder in FOLDERS} | {"tools"}


def test_no_script_needs_hatch_on_the_path() -> None:
    """make has a hatch of its own, so a script that ran `hatch` would find none on a fresh machine."""
    environments = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]
    scripts = [script for one in environments.values() for script in one.get("scripts", {}).values()]
    lines = [line for script in scripts for line in ([script] if isinstance(script, str) else script)]
    assert lines
    assert not [line for line in lines if "hatch" in line.split()]


def test_every_benchmark_can_be_imported() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-o", "python_files=bench_*.py", "--collect-only", "packages"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
