"""What a wheel of the kernels holds, and how it is tagged, with and without a compiler."""

from __future__ import annotations

import re
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
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


def files_of(*variants: str) -> set[str]:
    return {path(name).name for name in variants for path in (build_native.library_path, build_native.digest_path)}


def expected_libraries() -> set[str]:
    return files_of(*build_native.variants())


def write_digests(folder: Path) -> None:
    for name in build_native.variants():
        build_native.digest_path(name, folder).write_text(build_native.digest(name), encoding="ascii")


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("version", ["standard", "editable"])
def test_a_digest_without_libraries_gives_a_pure_wheel(checkout: Path, version: str) -> None:
    write_digests(libraries_of(checkout))
    assert build_wheel(checkout, version) == ("any", set())


@pytest.mark.usefixtures("no_compiler")
def test_libraries_of_other_sources_are_not_shipped(checkout: Path) -> None:
    for name in expected_libraries():
        (libraries_of(checkout) / name).write_text("old", encoding="ascii")
    assert build_wheel(checkout) == ("any", set())


@pytest.mark.usefixtures("compiler")
def test_a_digest_without_libraries_is_no_reason_not_to_compile(checkout: Path) -> None:
    write_digests(libraries_of(checkout))
    tag, names = build_wheel(checkout)
    assert tag != "any"
    assert names == expected_libraries()


@pytest.mark.usefixtures("compiler")
def test_only_the_variants_of_today_are_shipped(checkout: Path) -> None:
    (libraries_of(checkout) / "libllmstack_kernels_former.so").write_text("old", encoding="ascii")
    assert build_wheel(checkout)[1] == expected_libraries()


@pytest.mark.usefixtures("compiler")
def test_an_editable_installation_gets_the_variant_of_this_processor(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_wheel(checkout, "editable")
    built = {path.name for path in libraries_of(checkout).iterdir()} - {"lock", "objects"}
    assert built == files_of(build_native.runnable_variants()[0])
    monkeypatch.setenv("LLMSTACK_BUILD_NATIVE", "no")
    shutil.rmtree(libraries_of(checkout))
    build_wheel(checkout, "editable")
    assert not libraries_of(checkout).exists()


def test_a_build_that_fails_leaves_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in expected_libraries():
        (tmp_path / name).write_text("of other sources", encoding="ascii")
    monkeypatch.setattr(build_native, "find_compiler", lambda: "/bin/false")
    with pytest.raises(build_native.BuildError):
        build_native.build(folder=tmp_path)
    assert not list(tmp_path.glob("*.digest"))


class Sources:
    """A small package of kernels, and what was compiled of it."""

    def __init__(self, folder: Path) -> None:
        self.package, self.libraries = folder / "package", folder / "lib"
        for name, text in {
            "native/simd.h": "",
            "linear/native_stored.cpp": '#include "../native/simd.h"\n',
            "linear/native.cpp": "",
            "linear/native_segments.cpp": "",
            "paged_attention/native.cpp": '#include "items.h"\n',
            "paged_attention/items.h": "",
            "argmax/native.cpp": "",
        }.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        (self.package / name).parent.mkdir(parents=True, exist_ok=True)
        (self.package / name).write_text(text, encoding="utf-8")

    def compiled(self, *names: str) -> set[str]:
        """The units that a build of the variants `names` compiles."""
        before = set((self.libraries / "objects").glob("*.o"))
        build_native.build(names, self.libraries)
        return {path.name.rpartition("-")[0] for path in set((self.libraries / "objects").glob("*.o")) - before}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: None) -> Sources:
    made = Sources(tmp_path)
    monkeypatch.setattr(build_native, "PACKAGE", made.package)
    monkeypatch.setattr(build_native, "machine", lambda: "x86_64")
    return made


def test_only_what_changed_is_compiled_again(sources: Sources) -> None:
    units = ("native_stored", "paged_attention", "linear", "segments", "others")
    assert sources.compiled("avx2") == {f"avx2-{unit}" for unit in units}
    assert sources.compiled("avx2") == set()
    assert sources.compiled("avx2", "portable") == {f"portable-{unit}" for unit in units}
    sources.write("paged_attention/items.h", "// another")
    assert build_native.is_stale("avx2", sources.libraries)
    assert sources.compiled("avx2") == {"avx2-paged_attention"}
    sources.write("native/simd.h", "// another")
    assert sources.compiled("avx2") == {"avx2-native_stored"}
    assert build_native.is_built("avx2", sources.libraries)
    assert build_native.is_stale("portable", sources.libraries)


def test_objects_of_former_sources_are_deleted(sources: Sources) -> None:
    sources.compiled("avx2", "portable")
    sources.write("argmax/native.cpp", "// another")
    sources.compiled("avx2")
    assert len(list((sources.libraries / "objects").glob("avx2-*"))) == 5
    assert len(list((sources.libraries / "objects").glob("portable-*"))) == 5


def test_two_builds_at_once_compile_once(sources: Sources) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: build_native.build(["avx2"], sources.libraries, said.append), range(4)))
    assert sum("compiling" in line for line in said) == 1


def test_the_build_says_what_is_compiled_and_how_long_it_takes(sources: Sources) -> None:
    said: list[str] = []
    build_native.build(["avx2"], sources.libraries, said.append)
    assert said[0] == "compiling avx2 in 5 units"
    assert re.fullmatch(r"5 of 5 units, \d+ s", said[-1])
