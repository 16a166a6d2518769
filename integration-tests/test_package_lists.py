"""`tools/make_package_lists.py`: which lists it writes, and that they are current."""

from __future__ import annotations

import runpy
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = """[project]
name = "llmstack-{name}"
description = "A package made for a test."
dependencies = [{dependencies}]
"""

Main = Callable[..., int]


@pytest.fixture(scope="module")
def main() -> Any:
    return runpy.run_path(str(ROOT / "tools" / "make_package_lists.py"))["main"]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that the tool reads and writes, in a folder of their own."""
    for file in [*ROOT.glob("packages/*/pyproject.toml"), ROOT / "pyproject.toml", ROOT / "README.md"]:
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    for folder in ROOT.glob("packages/*/src/llmstack_*"):
        (tmp_path / folder.relative_to(ROOT)).mkdir(parents=True)
    return tmp_path


def add_package(root: Path, name: str, dependencies: str = "") -> None:
    (root / "packages" / name / "src" / f"llmstack_{name}").mkdir(parents=True)
    text = PROJECT.format(name=name, dependencies=dependencies)
    (root / "packages" / name / "pyproject.toml").write_text(text, encoding="utf-8")


def tools_of(root: Path) -> dict[str, Any]:
    return dict(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"])


def contract(root: Path, name: str) -> dict[str, Any]:
    return next(contract for contract in tools_of(root)["importlinter"]["contracts"] if contract["id"] == name)


def test_the_lists_of_the_repository_are_current(main: Main) -> None:
    assert main(["--check"]) == 0


def test_a_new_leaf_is_written_into_every_list(main: Main, copy: Path) -> None:
    add_package(copy, "abacus")
    assert main(["--check"], copy) == 1
    assert main([], copy) == 0
    assert main(["--check"], copy) == 0
    tools = tools_of(copy)
    assert "packages/abacus/src" in tools["mypy"]["mypy_path"]
    assert "llmstack_abacus" in tools["ruff"]["lint"]["isort"]["known-first-party"]
    assert "llmstack_abacus" in tools["importlinter"]["root_packages"]
    assert "llmstack_abacus" in contract(copy, "leaves")["modules"]
    assert "llmstack_abacus" in contract(copy, "leaves-down")["source_modules"]
    assert "llmstack_abacus" in contract(copy, "no-torch")["source_modules"]
    assert "llmstack_abacus" in contract(copy, "no-code-in-data")["source_modules"]
    assert (
        "| [`llmstack-abacus`](packages/abacus) | A package made for a test | no |" in (copy / "README.md").read_text()
    )


def test_a_package_that_requires_torch_is_kept_out_of_the_contract_without_it(main: Main, copy: Path) -> None:
    add_package(copy, "abacus", '"torch>=2.6"')
    assert main([], copy) == 0
    assert "llmstack_abacus" not in contract(copy, "no-torch")["source_modules"]
    assert (
        "| [`llmstack-abacus`](packages/abacus) | A package made for a test | yes |" in (copy / "README.md").read_text()
    )


def test_a_package_with_siblings_must_be_put_into_a_layer(
    main: Main, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_package(copy, "abacus", '"llmstack-types>=0.2,<0.3"')
    assert main([], copy) == 1
    assert "llmstack_abacus is in 0 layers" in capsys.readouterr().out
    assert "llmstack_abacus" in contract(copy, "leaves-down")["forbidden_modules"]
    file = copy / "pyproject.toml"
    file.write_text(
        file.read_text().replace("layers = [\n", 'layers = [\n    "llmstack_abacus",\n', 1), encoding="utf-8"
    )
    assert main(["--check"], copy) == 0


def test_a_missing_list_is_an_error(main: Main, copy: Path) -> None:
    file = copy / "pyproject.toml"
    file.write_text(file.read_text().replace("known-first-party", "known-third-party"), encoding="utf-8")
    with pytest.raises(ValueError, match="known-first-party"):
        main([], copy)
