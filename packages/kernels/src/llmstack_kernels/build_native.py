"""Build of the native kernels: one library for each kind of processor.

The build hook of the package calls it, and so do developers: `python -m llmstack_kernels.build_native`. It needs a C++
compiler alone, and imports neither PyTorch nor its siblings; so it also runs as a file, before anything is installed.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent
LIBRARIES = PACKAGE / "native" / "lib"

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
# A variant that is another's library with some functions of its own, and better. Linux may refuse it to a process.
_SHARED_LIBRARIES = {"amx": "avx512bf16"}

ALL_VARIANTS = frozenset(name for variants in _VARIANTS.values() for name in variants) | _SHARED_LIBRARIES.keys()
"""Names of the variants of all families of processors."""

# What the processor must offer for each variant, as /proc/cpuinfo names it.
_AVX512_FEATURES = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"})
_BFLOAT16_FEATURES = _AVX512_FEATURES | {"avx512_vnni", "avx512_bf16"}
_REQUIRED_FEATURES = {
    "amx": _BFLOAT16_FEATURES | {"amx_tile", "amx_bf16"},
    "avx512bf16": _BFLOAT16_FEATURES,
    "avx512": _AVX512_FEATURES,
    "avx2": frozenset({"avx2", "fma", "f16c"}),
}

# Of Linux on x86-64: the system call, its request for a part of the processor's state, and the part.
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18

_MACHINE_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}

# Translation units with the files that they include, those that take longest first; "others" has the rest. Parsing the
# intrinsics takes longer than compiling most of the sources, so these share a unit.
_UNITS: Mapping[str, tuple[str, ...]] = {
    "native_stored": ("linear/native_stored.cpp", "linear/native_stored_packing.cpp"),
    "paged_attention": ("paged_attention/native.cpp",),
    "linear": (
        "linear/native.cpp",
        "linear/native_dynamic.cpp",
        "linear/native_rounding.cpp",
        "linear/native_tiles.cpp",
    ),
    "segments": (
        "embedding/native_blocks.cpp",
        "linear/native_segment_packing.cpp",
        "linear/native_segment_tiles.cpp",
        "linear/native_segments.cpp",
    ),
    "others": (),
}

Report = Callable[[str], None]


class BuildError(RuntimeError):
    """The kernels could not be compiled; the text ends with the compiler's messages."""


def machine() -> str:
    """The processor's family: `x86_64`, `aarch64`, or the system's name for it."""
    name = platform.machine().lower()
    return _MACHINE_ALIASES.get(name, name)


def variants() -> Mapping[str, tuple[str, ...]]:
    """Kinds of processors of this machine's family, best first, and the compiler's flags for each."""
    return _VARIANTS.get(machine(), {"portable": ()})


def named_variants() -> list[str]:
    """Names of this family's variants, best first; two of them may share a library."""
    sharers = {library: name for name, library in _SHARED_LIBRARIES.items()}
    return [name for library in variants() for name in (sharers.get(library), library) if name]


def runnable_variants() -> list[str]:
    """The variants that this processor can run and this process may, built or not, best first."""
    return [name for name in named_variants() if _fits(name) and not (name in _SHARED_LIBRARIES and tiles_refusal())]


def _fits(variant: str) -> bool:
    return _REQUIRED_FEATURES.get(variant, set()) <= _processor_features()


@cache
def tiles_refusal() -> str:
    """Why this process may not use AMX's tiles, for which it asks the system once; "" where it may, or there are none.

    Linux before 5.16 does not know the request, and a sandbox may refuse it. The answer holds for all threads.
    """
    if not _fits("amx"):
        return ""
    system = ctypes.CDLL(None, use_errno=True)
    if system.syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


@cache
def _processor_features() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux: what every processor of the family has
        return frozenset()
    return next((frozenset(line.split(":")[1].split()) for line in lines if line.startswith("flags")), frozenset())


def library_path(variant: str, folder: Path = LIBRARIES) -> Path:
    """The path of the library for `variant`, whether it exists or not."""
    return folder / f"libllmstack_kernels_{_library(variant)}.so"


def flags_of(variant: str) -> tuple[str, ...]:
    """The compiler's flags for the processors of `variant`."""
    return variants()[_library(variant)]


def _library(variant: str) -> str:
    return _SHARED_LIBRARIES.get(variant, variant)


def digest_path(variant: str, folder: Path = LIBRARIES) -> Path:
    """The path of the file that says which sources the library was built from."""
    return library_path(variant, folder).with_suffix(".digest")


def find_compiler() -> str | None:
    """The C++ compiler: `CXX` if set, else the first of c++, g++ and clang++ on the path."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((found for name in candidates if (found := shutil.which(name))), None)


def digest(variant: str) -> str:
    """A digest of the sources, and of the flags of `variant`."""
    return _digest_of(variant, [*_sources(), *sorted(PACKAGE.glob("*/*.h"))])


def _digest_of(variant: str, paths: Sequence[Path]) -> str:
    digest = hashlib.sha256(repr((_COMMON_FLAGS, flags_of(variant))).encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_built(variant: str, folder: Path = LIBRARIES) -> bool:
    """Whether `folder` holds the library of `variant`, built from the present sources."""
    if not library_path(variant, folder).is_file():
        return False  # a digest may outlive the library it describes
    file = digest_path(variant, folder)
    return file.is_file() and file.read_text(encoding="ascii") == digest(variant)


def is_stale(variant: str, folder: Path = LIBRARIES) -> bool:
    """Whether `folder` holds a library of `variant` that was built from other sources than the present ones."""
    return library_path(variant, folder).is_file() and not is_built(variant, folder)


def build(
    names: Sequence[str] | None = None, folder: Path = LIBRARIES, report: Report = lambda message: None
) -> list[Path]:
    """Compile the variants `names` (default: all of this family) into `folder`, where they are not up to date.

    Units whose sources did not change are not compiled again. Another process that builds meanwhile is waited for.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    names = list(dict.fromkeys(map(_library, variants() if names is None else names)))
    if not all(is_built(name, folder) for name in names):
        with _alone(folder, report):
            missing = [name for name in names if not is_built(name, folder)]
            if missing:
                _build_missing(missing, folder, report)
    return [library_path(name, folder) for name in names]


@contextmanager
def _alone(folder: Path, report: Report) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that compiles them")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Unit(NamedTuple):
    """One call of the compiler: some sources for one variant."""

    name: str
    variant: str
    sources: tuple[Path, ...]

    def object_path(self, folder: Path) -> Path:
        """The path of its object: the name holds a digest of what it was compiled from."""
        return folder / f"{self.variant}-{self.name}-{_digest_of(self.variant, _included(self.sources))[:16]}.o"


def _build_missing(names: Sequence[str], folder: Path, report: Report) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found (c++, g++ or clang++; or set CXX)")
    objects = folder / "objects"
    objects.mkdir(exist_ok=True)
    for name in names:  # a build that fails halfway leaves a library of other sources, which no digest may describe
        digest_path(name, folder).unlink(missing_ok=True)
    units = [_Unit(unit, name, sources) for name in names for unit, sources in _units().items()]
    _compile_all(compiler, [unit for unit in units if not unit.object_path(objects).is_file()], objects, report)
    for name in names:
        own = [unit.object_path(objects) for unit in units if unit.variant == name]
        _link(compiler, own, library_path(name, folder))
        digest_path(name, folder).write_text(digest(name), encoding="ascii")
        for former in set(objects.glob(f"{name}-*.o")) - set(own):
            former.unlink()


def _compile_all(compiler: str, units: Sequence[_Unit], objects: Path, report: Report) -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = {pool.submit(_compile, compiler, unit, objects, Path(scratch)): unit for unit in units}
        if jobs:
            report(f"compiling {', '.join(dict.fromkeys(unit.variant for unit in units))} in {len(jobs)} units")
        try:
            for done, job in enumerate(as_completed(jobs), start=1):
                job.result()
                report(f"{done} of {len(jobs)} units, {time.monotonic() - started:.0f} s")
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise


def _sources() -> list[Path]:
    return sorted([*PACKAGE.glob("*/native*.cpp"), *PACKAGE.glob("native/*.cpp")])


def _units() -> Mapping[str, tuple[Path, ...]]:
    rest = set(_sources())
    units = {}
    for name, sources in _UNITS.items():
        own = {PACKAGE / source for source in sources} & rest
        units[name] = tuple(sorted(own or rest))
        rest -= own
    return units


def _included(sources: Sequence[Path]) -> list[Path]:
    """The sources and every header that they include, directly or not."""
    found: dict[Path, None] = {}
    waiting = list(sources)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = None
            names = re.findall(r'^#include "(.+)"', path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            waiting += [(path.parent / name).resolve() for name in names]
    return sorted(found)


def _compile(compiler: str, unit: _Unit, objects: Path, scratch: Path) -> None:
    source, target = scratch / f"{unit.variant}-{unit.name}.cpp", scratch / f"{unit.variant}-{unit.name}.o"
    source.write_text("".join(f'#include "{path}"\n' for path in unit.sources), encoding="utf-8")
    _run([compiler, *_COMMON_FLAGS, *variants()[unit.variant], "-c", str(source), "-o", str(target)])
    partial = unit.object_path(objects).with_suffix(".partial")
    shutil.copy(target, partial)
    partial.replace(unit.object_path(objects))


def _link(compiler: str, objects: Sequence[Path], target: Path) -> None:
    # Renamed into place: a running process keeps the library that it has mapped.
    partial = target.with_suffix(".partial")
    _run([compiler, "-shared", *map(str, objects), "-o", str(partial)])
    partial.replace(target)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m llmstack_kernels.build_native", description=__doc__)
    parser.add_argument("variants", nargs="*", choices=[*variants(), []], help="variants to compile (default: all)")
    parser.add_argument("--best", action="store_true", help="compile the one variant that this processor runs")
    arguments = parser.parse_args()
    names = runnable_variants()[:1] if arguments.best else arguments.variants or None
    try:
        paths = build(names, report=lambda message: print(f"native kernels: {message}", flush=True))  # noqa: T201
    except BuildError as error:
        print(f"native kernels: {error}", file=sys.stderr)  # noqa: T201 - a command's own report
        return 1
    print("native kernels:", ", ".join(path.name for path in paths))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
