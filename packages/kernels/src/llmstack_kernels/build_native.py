"""Build of the native kernels: one library for each kind of processor.

The build hook of the package calls it, and so do developers: `python -m llmstack_kernels.build_native`. It needs a C++
compiler alone, and imports neither PyTorch nor its siblings.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
LIBRARIES = PACKAGE / "native" / "lib"
DIGEST_FILE = "digest"

# -O2 leaves the tiles' sums in memory: two and a half times as slow (GCC 12).
# No contraction by the compiler: which sums are fused is part of the numeric contract, so the sources say it.
_COMMON_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c")

# Machine to kind of processor, best first, to the compiler's flags for it.
_VARIANTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx512bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
        "avx512": _AVX512,
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "portable": ("-O1",),  # for processors from before 2013: quickly compiled rather than quick
    },
    "aarch64": {"neon": ()},
}
ALL_VARIANTS = frozenset(name for variants in _VARIANTS.values() for name in variants)
"""Names of the variants of all families of processors."""

_MACHINE_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}


class BuildError(RuntimeError):
    """The kernels could not be compiled; the text ends with the compiler's messages."""


def machine() -> str:
    """The processor's family: `x86_64`, `aarch64`, or the system's name for it."""
    name = platform.machine().lower()
    return _MACHINE_ALIASES.get(name, name)


def variants() -> Mapping[str, tuple[str, ...]]:
    """Kinds of processors of this machine's family, best first, and the compiler's flags for each."""
    return _VARIANTS.get(machine(), {"portable": ()})


def library_path(variant: str, folder: Path = LIBRARIES) -> Path:
    """The path of the library for `variant`, whether it exists or not."""
    return folder / f"libllmstack_kernels_{variant}.so"


def find_compiler() -> str | None:
    """The C++ compiler: `CXX` if set, else the first of c++, g++ and clang++ on the path."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((found for name in candidates if (found := shutil.which(name))), None)


def digest() -> str:
    """A digest of the sources and the flags."""
    digest = hashlib.sha256(repr((_COMMON_FLAGS, _VARIANTS)).encode())
    for path in sorted([*_sources(), *PACKAGE.glob("*/*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_built(folder: Path = LIBRARIES) -> bool:
    """Whether `folder` holds a library of every variant, built from the present sources."""
    file = folder / DIGEST_FILE
    if not all(library_path(variant, folder).is_file() for variant in variants()):
        return False  # a digest may outlive the libraries it describes
    return file.is_file() and file.read_text(encoding="ascii") == digest()


def build(folder: Path = LIBRARIES) -> list[Path]:
    """Compile every variant into `folder`, unless it is up to date.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    paths = [library_path(variant, folder) for variant in variants()]
    if is_built(folder):
        return paths
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found (c++, g++ or clang++; or set CXX)")
    folder.mkdir(parents=True, exist_ok=True)
    # A build that fails halfway leaves libraries of different sources, which no digest may describe.
    (folder / DIGEST_FILE).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(_compile, compiler, unit, flags, Path(scratch) / f"{variant}-{unit.stem}.o")
            for unit in _write_units(Path(scratch))
            for variant, flags in variants().items()
        ]
        for job in jobs:
            job.result()
        for variant in variants():
            _link(compiler, sorted(Path(scratch).glob(f"{variant}-*.o")), library_path(variant, folder))
    (folder / DIGEST_FILE).write_text(digest(), encoding="ascii")
    return paths


def _sources() -> list[Path]:
    return sorted([*PACKAGE.glob("*/native*.cpp"), *PACKAGE.glob("native/*.cpp")])


def _write_units(folder: Path) -> list[Path]:
    """Translation units that include the sources: attention and stored weights, whose names would clash, and the rest.

    Parsing the intrinsics takes longer than compiling most of the sources, so these share a unit.
    """
    unit_to_sources: dict[str, list[Path]] = {"others": [], "paged_attention": [], "native_stored": []}
    for source in _sources():
        own = next((name for name in (source.stem, source.parent.name) if name in unit_to_sources), "others")
        unit_to_sources[own].append(source)
    paths = []
    for name, sources in unit_to_sources.items():
        paths.append(folder / f"{name}.cpp")
        paths[-1].write_text("".join(f'#include "{source}"\n' for source in sources), encoding="utf-8")
    return paths


def _compile(compiler: str, source: Path, flags: tuple[str, ...], target: Path) -> None:
    _run([compiler, *_COMMON_FLAGS, *flags, "-c", str(source), "-o", str(target)])


def _link(compiler: str, objects: list[Path], target: Path) -> None:
    # Renamed into place: a running process keeps the library that it has mapped.
    partial = target.with_suffix(".partial")
    _run([compiler, "-shared", *map(str, objects), "-o", str(partial)])
    partial.replace(target)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")


def main() -> int:
    try:
        paths = build()
    except BuildError as error:
        print(f"native kernels: {error}", file=sys.stderr)  # noqa: T201 - a command's own report
        return 1
    print("native kernels:", ", ".join(path.name for path in paths))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
