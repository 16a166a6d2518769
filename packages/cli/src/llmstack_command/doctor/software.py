"""Findings about what is installed: the stack, its native kernels, Ray and models."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from llmstack_command.doctor.finding import Finding, module_of_file, package_module

SERVER = "llmstack-server"
IMPORTED = ("torch", "fastapi", "pydantic", "llmstack_server", "llmstack_model_runner")
"""Packages most of whose modules a start imports."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def packages() -> Iterator[Finding]:
    """The packages of the stack, and what they require and is not there."""
    ours = {one.name.lower().replace("_", "-"): one for one in distributions() if _is_ours(one)}
    if SERVER not in ours:
        yield Finding("packages", "problem", f"{SERVER} is not installed, which serves", f"pip install {SERVER}")
        return
    missing = sorted({name for one in ours.values() for name in _missing(one)})
    if missing:
        yield Finding("packages", "problem", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
        return
    versions = sorted({one.version for one in ours.values()})
    yield Finding("packages", "ok", f"{len(ours)} of the stack, {' and '.join(versions)}")


def native_kernels() -> Iterator[Finding]:
    """Whether the native kernels for this processor are compiled from the present sources."""
    builder = module_of_file("llmstack_kernels", "build_native.py")
    if builder is None:
        yield Finding("native kernels", "problem", "llmstack-kernels is not installed", "pip install llmstack-kernels")
        return
    runnable = builder.runnable_variants()
    found = next((name for name in runnable if builder.library_path(name).is_file()), None)
    rebuild = "run `make setup` in the clone, or python -m llmstack_kernels.build_native"
    if found is None:
        text = f"not compiled for this processor ({runnable[0]}): PyTorch's operations run, which are slow"
        yield Finding("native kernels", "note", text, f"install a C++ compiler, then {rebuild}")
    elif builder.is_stale(found):
        yield Finding("native kernels", "problem", f"{found}, older than their sources", rebuild)
    elif found != runnable[0]:
        text = f"{found}, compiled from the present sources; this processor runs {runnable[0]}, which is faster"
        yield Finding("native kernels", "note", text, rebuild)
    else:
        yield Finding("native kernels", "ok", f"{found}, compiled from the present sources")
    if builder.tiles_refusal():
        text = f"the processor has AMX, and the system refuses it: {builder.tiles_refusal()}"
        yield Finding(
            "native kernels", "note", text, "Linux grants it from 5.16 on, where no sandbox forbids arch_prctl"
        )


def bytecode(writes: bool | None = None, names: Sequence[str] = IMPORTED) -> Iterator[Finding]:
    """Whether what a start imports is compiled again by each start, which then takes twice as long.

    `writes`: Whether imports write bytecode; None for what this interpreter does.
    """
    writes = not sys.dont_write_bytecode if writes is None else writes
    specs = [spec for spec in map(find_spec, names) if spec is not None and spec.origin and spec.cached]
    lost = [spec for spec in specs if not _is_kept(Path(spec.cached or ""), writes)]
    if not lost:
        yield Finding("bytecode", "ok", "kept between starts")
        return
    folders = [str(Path(spec.origin or "").parent) for spec in lost]
    why = "cannot be written there" if writes else "PYTHONDONTWRITEBYTECODE is set"
    text = f"each start compiles {', '.join(spec.name for spec in lost)} again, for seconds: {why}"
    yield Finding("bytecode", "note", text, f"python -m compileall -q {' '.join(folders)}")


def _is_kept(file: Path, writes: bool) -> bool:
    """Whether the file exists, or an import makes it, with its folder."""
    folder = next((one for one in file.parents if one.exists()), file.parent)
    return file.exists() or (writes and os.access(folder, os.W_OK))


def ray() -> Iterator[Finding]:
    """Ray, which places ranks and replicas on several machines."""
    try:
        yield Finding("Ray", "ok", distribution("ray").version)
    except PackageNotFoundError:
        remedy = "only for clusters of Ray: pip install 'llmstack-parallel[ray]'"
        yield Finding("Ray", "note", "not installed", remedy)


def model() -> Iterator[Finding]:
    """The model that `llmstack serve` takes when none is named."""
    files, demo = package_module("llmstack_model_files"), package_module("llmstack_demo_model")
    if files is not None:
        for name, known in files.PACKAGED.items():
            if files.is_packaged_model_installed(name):
                yield Finding("model", "ok", f"{name} ({known.title}), which answers questions")
            else:
                yield Finding("model", "note", f"{name} ({known.title}) is not installed", known.install_command)
    if demo is None:
        yield Finding("model", "note", "the demo model is not installed", "pip install llmstack-demo-model")
    else:
        yield Finding("model", "ok", f"the embedded storyteller, {demo.model_path()}")


def _is_ours(one: Distribution) -> bool:
    return (one.metadata["Name"] or "").lower().replace("_", "-").startswith("llmstack-")


def _missing(one: Distribution) -> Iterator[str]:
    """Names of requirements that are not installed; those of extras and of other systems do not count."""
    for text in one.requires or ():
        name = _NAME.match(text)
        if name is None or ";" in text:
            continue
        try:
            distribution(name[0])
        except PackageNotFoundError:
            yield name[0]
