"""What a wheel of the kernels holds, and how it is tagged, with and without a compiler."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from llmstack_kernels import build_native

pytest.importorskip("hatchling", reason="hatchling is not installed")
from hatchling.builders.wheel import WheelBuilder

PACKAGE = Path(build_native.__file__).resolve().parents[2]
FAKE_COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""

pytestmark = pytest.mark.skipif(not (PACKAGE / "hatch_build.py").exists(), reason="needs the sources of the package")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the wheel is built from, outside any repository whose ignored files would be left out."""
    root = tmp_path / "kernels"
    shutil.copytree(PACKAGE / "src", root / "src", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "CHANGELOG.md"):
        shutil.copy(PACKAGE / name, root / name)
    libraries_of(root).mkdir()
    return root


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that writes a line of text instead of a library."""
    path = tmp_path / "compiler"
    path.write_text(FAKE_COMPILER, encoding="ascii")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/does/not/exist")


def libraries_of(checkout: Path) -> Path:
    return checkout / "src" / "llmstack_kernels" / "native" / "lib"


def build_wheel(checkout: Path, version: str = "standard") -> tuple[str, set[str]]:
    """The wheel's platform tag, and the names of what it holds of the folder of libraries."""
    path = Path(next(WheelBuilder(str(checkout)).build(directory=str(checkout / "dist"), versions=[version])))
    with zipfile.ZipFile(path) as archive:
        folder = "llmstack_kernels/native/lib/"
        names = {name.removeprefix(folder) for name in archive.namelist() if name.startswith(folder)}
    return path.stem.rpartition("-")[2], names


def expected_libraries() -> set[str]:
    return {build_native.library_path(variant).name for variant in build_native.variants()} | {"digest"}


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("version", ["standard", "editable"])
def test_a_digest_without_libraries_gives_a_pure_wheel(checkout: Path, version: str) -> None:
    (libraries_of(checkout) / "digest").write_text(build_native.digest(), encoding="ascii")
    assert build_wheel(checkout, version) == ("any", set())


@pytest.mark.usefixtures("no_compiler")
def test_libraries_of_other_sources_are_not_shipped(checkout: Path) -> None:
    for name in expected_libraries():
        (libraries_of(checkout) / name).write_text("old", encoding="ascii")
    assert build_wheel(checkout) == ("any", set())


@pytest.mark.usefixtures("compiler")
def test_a_digest_without_libraries_is_no_reason_not_to_compile(checkout: Path) -> None:
    (libraries_of(checkout) / "digest").write_text(build_native.digest(), encoding="ascii")
    tag, names = build_wheel(checkout)
    assert tag != "any"
    assert names == expected_libraries()


@pytest.mark.usefixtures("compiler")
def test_only_the_variants_of_today_are_shipped(checkout: Path) -> None:
    (libraries_of(checkout) / "libllmstack_kernels_former.so").write_text("old", encoding="ascii")
    assert build_wheel(checkout)[1] == expected_libraries()


def test_a_build_that_fails_leaves_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in expected_libraries() - {"digest"}:
        (tmp_path / name).write_text("old", encoding="ascii")
    (tmp_path / "digest").write_text("of other sources", encoding="ascii")
    monkeypatch.setattr(build_native, "find_compiler", lambda: "/bin/false")
    with pytest.raises(build_native.BuildError):
        build_native.build(tmp_path)
    assert not (tmp_path / "digest").exists()
